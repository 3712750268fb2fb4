"""The closed forms of looped breadth-first that are not in the table."""

from __future__ import annotations

import pytest

from hocket.core.costs import Costs
from hocket.core.op import Kind
from hocket.core.simulate import simulate
from hocket.schedules import Shape, make_schedule
from hocket.schedules.looped_bfs import ENTRY


def test_with_one_stage_per_device_it_is_gpipe_backwards() -> None:
    """The same work as GPipe's, with the backwards from the last microbatch on."""
    looped = make_schedule(
        "looped-bfs", num_devices=3, num_microbatches=4, stages_per_device=1
    )
    plain = make_schedule("gpipe", num_devices=3, num_microbatches=4)
    for ours, theirs in zip(looped.lanes, plain.lanes, strict=True):
        assert ours.ops[:4] == theirs.ops[:4]
        assert ours.ops[4:8] == theirs.ops[7:3:-1]


def test_each_stage_is_done_at_one_stroke() -> None:
    """Its backwards stand together, and its gradients are reduced while others run."""
    schedule = make_schedule(
        "looped-bfs",
        num_devices=2,
        num_microbatches=3,
        stages_per_device=2,
        num_replicas=2,
    )
    for lane in schedule.lanes:
        stages = [op.stage for op in lane.ops if op.kind is Kind.BACKWARD]
        assert stages == sorted(stages, reverse=True)
        reductions = [i for i, op in enumerate(lane.ops) if op.kind is Kind.REDUCE]
        assert lane.ops[reductions[0] + 1].kind is Kind.BACKWARD


@pytest.mark.parametrize("v", [2, 3])
def test_few_microbatches_leave_holes(v: int) -> None:
    """Each further stage costs `p - m` parts more, if `m < p`."""
    shape = Shape(num_devices=4, num_microbatches=2, stages_per_device=v)
    timeline = simulate(ENTRY.make(shape), Costs.uniform())
    holes = (v - 1) * (4 - 2)
    assert timeline.makespan_s - 2 * 3.0 == pytest.approx((4 - 1 + holes) * 3.0 / v)
