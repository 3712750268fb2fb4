"""The depths of ResNeXt: published ones, and multiples."""

from __future__ import annotations

import pytest

from hocket.errors import ShapeError
from hocket.recipes.config.resnext_depths import resnext_blocks


@pytest.mark.parametrize(("depth", "times"), [(200, 4), (302, 6), (500, 10), (800, 16)])
def test_the_deep_ones_are_multiples_of_the_fifty(depth: int, times: int) -> None:
    """As the published scripts make them."""
    assert resnext_blocks(depth) == tuple(times * n for n in (3, 4, 6, 3))


def test_no_other_depth_is_made_up() -> None:
    """Between the published ones."""
    with pytest.raises(ShapeError, match="no ResNeXt has depth 60: there are 14, 26,"):
        resnext_blocks(60)
