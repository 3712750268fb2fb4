"""Memory over time of random orders is what the definitions add up to."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hocket.core.costs import Costs, StageCost
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from tests.core.holds import assert_curves_add_up
from tests.core.random_orders import costs_for, orders


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(schedule=orders(), data=st.data())
def test_curves_are_what_definitions_add_up_to(
    schedule: Schedule, data: st.DataObject
) -> None:
    """Between any two instants, the sum over all that is held then, op by op."""
    costs = data.draw(costs_for(schedule.program))

    assert_curves_add_up(simulate(schedule, costs), costs)


@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(schedule=orders())
def test_activation_units_are_bytes_of_equal_stages(schedule: Schedule) -> None:
    """Both curves agree, if a microbatch has as many bytes as stages are counted.

    These are the trainable ones, where a device has any.
    """
    program = schedule.program
    counted = [
        [s for s in own if program.stages[s].trainable] or own
        for own in program.stages_on
    ]
    sizes = [
        60 * (number in counted[stage.device])
        for number, stage in enumerate(program.stages)
    ]
    costs = Costs(
        tuple(StageCost(1.0, 1.0, 1.0, 1.0, 1.0, activation_bytes=n) for n in sizes)
    )
    timeline = simulate(schedule, costs)

    for device, stages in enumerate(counted):
        units = timeline.activation_units(device)
        assert units.peak * len(stages) * 60 == timeline.peak_bytes(device)
