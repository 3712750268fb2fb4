"""The parts of a peak add up to it, and each is what it says."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hocket.core.costs import Costs, StageCost
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.core.simulator.memory import PeakBytes, peak_parts
from hocket.schedules import make_schedule
from tests.core.random_orders import costs_for, orders


def test_parts_by_hand() -> None:
    """GPipe: when the first B has ended, the gradients outweigh what it gave back."""
    schedule = make_schedule("gpipe", num_devices=2, num_microbatches=2)
    cost = StageCost(
        1.0,
        1.0,
        1.0,
        output_bytes=6,
        activation_bytes=100,
        weight_bytes=1000,
        gradient_bytes=900,
        optimizer_bytes=1800,
        backward_work_bytes=7,
    )
    costs = Costs((cost, cost))

    first, second = peak_parts(simulate(schedule, costs), costs)

    assert first == PeakBytes(1000, 900, 1800, 107, 0)
    assert second == PeakBytes(1000, 900, 1800, 107, 6)
    assert second.total_bytes == 3813


@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(schedule=orders(), data=st.data())
def test_parts_add_up(schedule: Schedule, data: st.DataObject) -> None:
    """Whatever the order: to the peak, of parts that are none of them below 0."""
    costs = data.draw(costs_for(schedule.program))
    timeline = simulate(schedule, costs)

    for device, part in enumerate(peak_parts(timeline, costs)):
        assert part.total_bytes == timeline.peak_bytes(device)
        assert min(part.activation_bytes, part.message_bytes) >= 0
