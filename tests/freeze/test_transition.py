"""What moves when the layout changes, and how long it is predicted to take."""

from __future__ import annotations

import pytest

from hocket.core.costs import Link
from hocket.freeze.shapes import Frozen
from hocket.run.elastic.shape_choice import TransitionCosts, moved_bytes
from tests.freeze.test_shapes import layers


def test_only_what_a_worker_lacks_moves() -> None:
    """Eight layers on four workers: half of them freeze, and two stages are left.

        device 0: 0 1 │ 1: 2 3 │ 2: 4 5 │ 3: 6 7          weights 10, moments 20 bytes
        worker 0, 2: [0 1 2 3] 4 5 │ 1, 3: 6 7

    Worker 0 receives 2 3 frozen and 4 5; 1 receives 6 7; 2 receives 0 to 3 frozen.
    """
    whole, half = Frozen(layers([1.0] * 8), 0), Frozen(layers([1.0] * 8), 4)
    before = whole.layers_on((2, 4, 6), 4)
    assert before == (range(2), range(2, 4), range(4, 6), range(6, 8))
    after = half.layers_on((4, 6), 2)
    assert after == (range(6), range(6, 8))
    assert half.layers_on((4,), 1) == whole.layers_on((), 1) == (range(8),)
    frozen, trained = 10, 30
    expected = (2 * frozen + 2 * trained) + 2 * trained + 4 * frozen
    assert moved_bytes(half, before, after, 4) == expected
    assert moved_bytes(half, after, after, 4) == 0


def test_the_fixed_part_is_that_of_the_measured_ones() -> None:
    """2 s until one was measured; the messages' seconds are not counted twice."""
    link = Link(latency_s=0.0, bytes_per_s=100.0)
    costs = TransitionCosts(link)
    assert costs.seconds(300) == pytest.approx(2.0 + 3.0)
    costs.add(100, 1.5)
    costs.add(200, 2.7)
    assert costs.seconds(300) == pytest.approx(0.6 + 3.0)
