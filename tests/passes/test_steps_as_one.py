"""Several steps, seen as one, are the same work in the same order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from hocket.core.costs import Costs
from hocket.core.op import ONCE_PER_STEP
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.run.tune.dry_run import steps_as_one
from hocket.schedules import make_schedule


def without_ends(name: str, num_steps: int) -> Schedule:
    """Forwards and backwards alone."""
    made = make_schedule(name, num_devices=2, num_microbatches=4, num_steps=num_steps)
    lanes = tuple(
        replace(lane, ops=tuple(x for x in lane.ops if x.kind not in ONCE_PER_STEP))
        for lane in made.lanes
    )
    return replace(made, lanes=lanes, body=(), num_repeats=0)


@pytest.mark.parametrize("name", ["pipedream-2bw", "wpipe", "wpipe-overlapped"])
def test_every_op_is_there_once_and_in_its_place(name: str) -> None:
    """Microbatches are counted through; the simulator finds what each op needs."""
    several = without_ends(name, 3)
    one = steps_as_one(several)

    for before, after in zip(several.lanes, one.lanes, strict=True):
        assert [(x.kind, x.stage) for x in before.ops] == [
            (x.kind, x.stage) for x in after.ops
        ]
    ops = Counter(op for lane in one.lanes for op in lane.ops)
    assert set(ops.values()) == {1}
    assert len(ops) == 2 * one.program.num_stages * 3 * 4
    assert {op.microbatch for op in ops} == set(range(3 * 4))
    assert {stage.delay for stage in one.program.stages} == {0}
    assert simulate(one, Costs.uniform()).makespan_s > 0


def test_one_step_stays_as_it_is() -> None:
    """An order of one step is returned as it is."""
    schedule = make_schedule("1f1b", num_devices=2, num_microbatches=4)

    assert steps_as_one(schedule) is schedule
