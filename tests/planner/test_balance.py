"""Balancing is exact: no cut has a faster slowest stage."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import ShapeError
from hocket.planner.balance import balance

seconds = st.integers(0, 9).map(float)


def stages(layer_s: list[float], boundaries: tuple[int, ...]) -> list[float]:
    """Seconds of each stage."""
    edges = (0, *boundaries, len(layer_s))
    return [sum(layer_s[a:b]) for a, b in pairwise(edges)]


@given(st.lists(seconds, min_size=1, max_size=8), st.data())
def test_no_cut_is_better(layer_s: list[float], data: st.DataObject) -> None:
    """Against every cut there is."""
    num_stages = data.draw(st.integers(1, len(layer_s)))
    count = len(layer_s)
    found = stages(layer_s, balance(layer_s, num_stages))

    others = [
        stages(layer_s, cuts) for cuts in combinations(range(1, count), num_stages - 1)
    ]
    assert len(found) == num_stages
    assert max(found) == min(max(other) for other in others)
    equal = [other for other in others if max(other) == max(found)]
    assert sum(x * x for x in found) == min(sum(x * x for x in o) for o in equal)


def test_equal_layers_make_equal_stages() -> None:
    """Eight layers on four devices."""
    assert balance([1.0] * 8, 4) == (2, 4, 6)


def test_too_few_layers_name_the_numbers() -> None:
    """Three stages need three layers."""
    with pytest.raises(ShapeError, match="2 layers cannot be cut into 3 stages"):
        balance([1.0, 2.0], 3)
