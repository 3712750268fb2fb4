"""Frozen stages run forward only, in an order that is still a sound one."""

from __future__ import annotations

import pytest

from hocket.core.check import check
from hocket.core.costs import Costs
from hocket.core.op import Kind
from hocket.core.simulate import simulate
from hocket.passes.freeze_stages import freeze_stages
from hocket.schedules import make_schedule

ORDERS = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs")


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("num_frozen", [0, 1, 2, 3])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_is_sound(name: str, num_frozen: int, num_replicas: int) -> None:
    """Everything that is due is there, nothing else, and no lane waits for ever."""
    schedule = make_schedule(
        name, num_devices=4, num_microbatches=4, num_replicas=num_replicas
    )

    frozen = freeze_stages(schedule, num_frozen)

    check(frozen)
    trained = [stage.trainable for stage in frozen.program.stages]
    assert trained == [s >= num_frozen for s in range(frozen.program.num_stages)]


@pytest.mark.parametrize("name", ORDERS)
def test_forwards_stay_in_their_order(name: str) -> None:
    """Only backwards, reductions and updates go."""
    schedule = make_schedule(name, num_devices=2, num_microbatches=4, num_replicas=2)

    frozen = freeze_stages(schedule, 1)

    for before, after in zip(schedule.lanes, frozen.lanes, strict=True):
        kept = [op for op in before.ops if op.stage > 0 or op.kind in (Kind.FORWARD,)]
        assert list(after.ops) == kept


def test_saves_the_backward() -> None:
    """On two devices, GPipe without the first one's backward ends with the second's."""
    schedule = make_schedule("gpipe", num_devices=2, num_microbatches=4)
    costs = Costs.uniform(
        forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, message_s=0.0
    )

    whole = simulate(schedule, costs).makespan_s
    frozen = simulate(freeze_stages(schedule, 1), costs).makespan_s

    assert whole == (4 + 1) * 3.0
    assert frozen == 1.0 + 4 * 3.0
