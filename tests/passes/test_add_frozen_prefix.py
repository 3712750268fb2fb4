"""A frozen part before the pipeline: sound orders, and the work that they have."""

from __future__ import annotations

import pytest

from hocket.core.check import check
from hocket.core.costs import Costs, StageCost
from hocket.core.op import Kind
from hocket.core.simulate import simulate
from hocket.errors import PlanError
from hocket.passes.add_frozen_prefix import add_frozen_prefix
from hocket.passes.freeze_stages import freeze_stages
from hocket.schedules import make_schedule


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1"])
@pytest.mark.parametrize("num_devices", [1, 2, 4])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_is_sound(name: str, num_devices: int, num_replicas: int) -> None:
    """Everything that is due is there, nothing else, and no lane waits for ever."""
    schedule = make_schedule(
        name,
        num_devices=num_devices,
        num_microbatches=4,
        num_replicas=num_replicas,
    )

    longer = add_frozen_prefix(schedule)

    check(longer)
    first, *others = longer.program.stages
    assert not first.trainable
    assert first.device == others[0].device
    assert tuple(others) == schedule.program.stages
    own = [op.kind for lane in longer.lanes for op in lane.ops if op.stage == 0]
    assert own == [Kind.FORWARD] * 4


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_is_sound_behind_frozen_stages(name: str) -> None:
    """What the stage in front of it sent goes through it, and no gradient comes back.

    Lines are stages 1 (frozen) and 2 (trained) on device 1, behind stage 0 on device 0.
    """
    schedule = make_schedule(name, num_devices=3, num_microbatches=2)

    longer = add_frozen_prefix(freeze_stages(schedule, 1), before=1)

    check(longer)
    stages = longer.program.stages
    assert [(x.device, x.trainable) for x in stages] == [
        (0, False),
        (1, False),
        (1, True),
        (2, True),
    ]
    assert longer.program.flows == ((0, 1), (1, 2), (2, 3))
    own = [[str(op) for op in lane.ops] for lane in longer.lanes]
    assert own[0] == ["0F0", "0F1"]
    assert own[1][:2] == ["1F0", "2F0"]
    assert not {"1B0", "1B1", "1W0", "1U"}.intersection(own[1])


def test_the_forward_is_all_that_it_costs() -> None:
    """On one device, four more forwards."""
    schedule = make_schedule("gpipe", num_devices=1, num_microbatches=4)
    active = StageCost(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0)
    costs = Costs((StageCost(forward_s=5.0), active))

    assert simulate(add_frozen_prefix(schedule), costs).makespan_s == 4 * (5.0 + 3.0)


def test_refuses_copies_of_stages() -> None:
    """Chimera's two pipelines have two first stages."""
    schedule = make_schedule("chimera", num_devices=4, num_microbatches=4)
    with pytest.raises(PlanError, match="groups of copies"):
        add_frozen_prefix(schedule)
