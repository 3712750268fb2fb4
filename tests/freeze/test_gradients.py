"""Policies that look at gradients, on sequences of norms written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hocket.errors import ConfigError
from hocket.freeze import ArgminGradient, Percentile
from hocket.freeze.policy import Decider, Policy


def decisions(policy: Policy[Any], norms: Sequence[Sequence[float]]) -> list[int]:
    """What a policy decides on one set of norms after the other."""
    decider = Decider(policy, len(norms[0]))
    return [decider.ask(n, measured=tuple(x)) for n, x in enumerate(norms, 1)]


def test_argmin_freezes_up_to_the_smallest_within_its_share() -> None:
    """Layer 3 of 8 is the smallest; a share of 1/4 allows 2 at first."""
    norms = [[3, 2, 1, 4, 5, 6, 7, 8]] * 3
    assert decisions(ArgminGradient(1 / 4, patience=1), norms) == [2, 3, 4]
    assert decisions(ArgminGradient(1 / 2, patience=1), norms) == [3, 4, 5]


def test_argmin_looks_at_active_layers_alone() -> None:
    """Frozen layers have norm 0, and are the smallest no more."""
    norms = [[1, 2, 3, 4], [0, 3, 2, 4]]
    assert decisions(ArgminGradient(1 / 2, patience=1), norms) == [1, 3]


def test_percentile_first_records() -> None:
    """The change needs two sets of norms; then layers before the median change freeze.

    Changes are 0.1, 0.2, 0.5, 0.4: the median is 0.3, and layer 2 is the first with at
    least that.
    """
    norms = [[10, 10, 10, 10], [9, 8, 5, 6]]
    assert decisions(Percentile(patience=1), norms) == [0, 2]


def test_percentile_freezes_no_layer_that_still_changes() -> None:
    """The released code of PipeTransformer freezes one layer too many."""
    assert decisions(Percentile(patience=1), [[10, 10, 10], [5, 9, 9]]) == [0, 0]
    assert decisions(Percentile(patience=1), [[10, 10], [10, 10]]) == [0, 0]


def test_percentile_begins_at_the_first_active_layer() -> None:
    """Frozen layers do not change; they neither count nor stop the search."""
    norms = [[10, 10, 10, 10], [10, 10, 5, 5], [0, 0, 5, 1]]
    assert decisions(Percentile(patience=1), norms) == [0, 2, 3]


def test_a_gradient_that_was_0_does_not_change() -> None:
    """No division by it."""
    assert decisions(Percentile(patience=1), [[0, 10, 10], [0, 5, 5]]) == [0, 1]


def test_one_noisy_measurement_freezes_nothing() -> None:
    """By default two proposals in a row count, and the smaller of them."""
    norms = [[100, 100, 100, 100], [99, 98, 90, 50], [50, 97, 89, 49]]
    assert decisions(Percentile(patience=1), norms) == [0, 2, 3]
    assert decisions(Percentile(), norms) == [0, 0, 0]
    calm = [*norms[:2], [98, 97, 80, 40]]
    assert decisions(Percentile(), calm) == [0, 0, 2]
    argmin = [[1, 2, 3, 4], [2, 1, 3, 4], [3, 2, 1, 4]]
    assert decisions(ArgminGradient(0.9), argmin) == [0, 1, 2]


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
@pytest.mark.parametrize("layers", [[0], [1], [0, 1, 2, 3]])
def test_norms_that_overflowed_freeze_nothing(layers: list[int], odd: float) -> None:
    """Past bug: Percentile stopped at StopIteration where all norms were NaN.

    Where one was, ArgminGradient took it for the smallest. The norms before them are
    compared with those after them.
    """
    wrong = [odd if i in layers else 10.0 for i in range(4)]
    norms = [[10.0] * 4, wrong, [9.0, 8.0, 5.0, 6.0]]
    assert decisions(Percentile(patience=1), norms) == [0, 0, 2]
    norms = [[1.0, 2.0, 3.0, 4.0], wrong, *[[2.0, 1.0, 3.0, 4.0]] * 2]
    assert decisions(ArgminGradient(0.9), norms) == [0, 0, 0, 2]
    assert decisions(ArgminGradient(0.9, patience=1), [wrong]) == [0]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Percentile(percentile=101), "percentile is 101"),
        (lambda: Percentile(patience=0), "patience is 0"),
        (lambda: ArgminGradient(1.5), "alpha is 1.5"),
    ],
)
def test_refuses_numbers_out_of_range(make: object, match: str) -> None:
    """With the number and the range."""
    assert callable(make)
    with pytest.raises(ConfigError, match=match):
        make()
