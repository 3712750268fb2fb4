"""One step of an order without flushes is an order of its own."""

from __future__ import annotations

import pytest

from hocket.core.check import check
from hocket.passes.one_step import one_step
from hocket.schedules import make_schedule


@pytest.mark.parametrize("name", ["pipedream-2bw", "wpipe", "wpipe-overlapped"])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_one_step_runs_alone(name: str, num_replicas: int) -> None:
    """One step has all ops of step 0, reads the newest weights, and ends."""
    order = make_schedule(
        name,
        num_devices=3,
        num_microbatches=4,
        num_steps=5,
        num_replicas=num_replicas,
    )
    alone = one_step(order)
    assert set(check(alone).num_versions) == {1}
    for whole, lane in zip(order.lanes, alone.lanes, strict=True):
        assert lane.ops == tuple(op for op in whole.ops if op.step == 0)


def test_an_order_with_flushes_is_one_already() -> None:
    """An order of one step is returned as it is."""
    order = make_schedule("zb-v", num_devices=2, num_microbatches=4)
    assert one_step(order) is order
