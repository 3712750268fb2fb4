"""Timelines of what was measured: the bytes in them, and the messages."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hocket.core.costs import Costs, StageCost
from hocket.core.schedule import Schedule
from hocket.core.simulate import observed, simulate
from hocket.core.timelines.timeline import Origin
from tests.core.random_orders import costs_for, orders

TWO_STAGES = Schedule.parse("d0  0F0 0B0 0U\nd1  1F0 1B0 1U")
COST = StageCost(output_bytes=4, input_grad_bytes=2, activation_bytes=100)


def test_message_is_on_its_way_until_it_is_read() -> None:
    """From the end of the op that made it to the start of the first that needs it."""
    timeline = observed(
        TWO_STAGES,
        Costs((COST, COST)),
        (np.array([0.0, 9.0, 10.0]), np.array([3.0, 5.0, 7.0])),
        (np.array([2.0, 10.0, 10.5]), np.array([5.0, 7.0, 8.0])),
        Origin.MEASURED,
    )

    assert timeline.origin is Origin.MEASURED
    assert [(t.from_device, t.start_s, t.end_s) for t in timeline.transfers] == [
        (0, 2.0, 3.0),
        (1, 7.0, 9.0),
    ]
    assert timeline.link_bytes() == {(0, 1): 4, (1, 0): 2}
    assert [timeline.memory[1].at(t) for t in (2.5, 3.5, 6.0, 7.5)] == [4, 104, 104, 0]


def test_clocks_that_differ_a_little_make_no_message_that_ends_before_it_starts() -> (
    None
):
    """Device 1 says it began before device 0 says it ended."""
    timeline = observed(
        TWO_STAGES,
        Costs((COST, COST)),
        (np.array([0.0, 9.0, 10.0]), np.array([1.5, 5.0, 7.0])),
        (np.array([2.0, 10.0, 10.5]), np.array([5.0, 7.0, 8.0])),
        Origin.MEASURED,
    )

    first = next(timeline.transfers)
    assert (first.start_s, first.end_s) == (2.0, 2.0)


@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(schedule=orders(), data=st.data())
def test_knows_what_the_simulator_knows(
    schedule: Schedule, data: st.DataObject
) -> None:
    """The same start and end of each op give the same traffic, at other times."""
    costs = data.draw(costs_for(schedule.program))
    predicted = simulate(schedule, costs)
    timeline = observed(
        schedule, costs, predicted.start_s, predicted.end_s, Origin.EMULATED
    )

    assert timeline.link_bytes() == predicted.link_bytes()
    assert timeline.makespan_s == predicted.makespan_s
    assert timeline.bubble_fraction == predicted.bubble_fraction
    for transfer in timeline.transfers:
        assert transfer.start_s <= transfer.end_s
