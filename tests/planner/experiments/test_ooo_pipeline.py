"""The experiments of out-of-order backprop: what must be so, whatever the seconds."""

from __future__ import annotations

import pytest

from hocket.planner.experiments.networks import dense
from hocket.planner.experiments.ooo_pipeline import (
    EXPERIMENTS,
    Experiment,
    results,
)


@pytest.mark.parametrize("experiment", EXPERIMENTS[:3], ids=lambda x: x.name)
def test_no_order_is_beyond_the_limit(experiment: Experiment) -> None:
    """And out-of-order backprop is faster than GPipe in all of its own experiments."""
    (result,) = results((experiment,))

    assert 1.0 < result.fast_forward <= result.limit * (1 + 1e-9)
    assert result.gpipe_s > 0
    assert result.best[1] >= 1.0


def test_modulo_wins_on_fast_links_and_loses_on_slow_ones() -> None:
    """Its messages are many: on NVLink that is nothing, on Ethernet too much.

    The artifact deals layers out on NVLink, and not over Ethernet.
    """
    fast, slow = results(EXPERIMENTS[:2])

    assert fast.modulo > fast.fast_forward
    assert slow.modulo < fast.modulo


def test_equal_layers_come_near_the_ideal() -> None:
    """Four devices, four microbatches: 1.40 times GPipe, and 1.68 with single layers.

    Ideal: 3 (m + p - 1) over 3 m + p - 1, and over 3 m + (p - 1) / v.
    """
    ideal = Experiment("equal", dense(24, 4096), 16384, 4, 4, is_published=False)
    (result,) = results((ideal,))

    assert result.fast_forward == pytest.approx(21 / 15, rel=0.03)
    assert result.modulo == pytest.approx(21 / (12 + 3 / 6), rel=0.05)
    assert result.group_size == 1
