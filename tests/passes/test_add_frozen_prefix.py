"""A frozen part before the pipeline: sound orders, and the work that they have."""

from __future__ import annotations

import pytest

from hocket.core.check import check
from hocket.core.costs import Costs, StageCost
from hocket.core.op import Kind
from hocket.core.simulate import simulate
from hocket.errors import PlanError
from hocket.passes.add_frozen_prefix import add_frozen_prefix
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
