"""The simulator's two clocks against a slow one, on random orders."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hocket.core.check import play
from hocket.core.checker.faults import op_faults
from hocket.core.costs import Costs, Link, StageCost
from hocket.core.dataflow import Value, is_given, makes, needs
from hocket.core.gates import early_updates, gates_of, stage_gates, with_gate
from hocket.core.op import Kind
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.core.simulator.clocks import (
    is_decided_by_lanes,
    play_events,
    play_in_order,
)
from hocket.core.simulator.work import prepare
from hocket.core.timelines.timeline import Timeline
from hocket.errors import DeadlockError
from hocket.schedules import make_schedule
from tests.core.random_orders import costs_for, orders
from tests.core.slow_clock import SlowClock

many = settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@many
@given(schedule=orders(max_streams=1, explicit=False), data=st.data())
def test_one_lane_per_device_is_as_slow_clock_says(
    schedule: Schedule, data: st.DataObject
) -> None:
    """Start and end of every op and message, exactly."""
    costs = data.draw(costs_for(schedule.program, shared=False))

    assert_is_as_slow_clock_says(schedule, costs)


@many
@given(schedule=orders(), data=st.data())
def test_any_order_is_as_slow_clock_says(
    schedule: Schedule, data: st.DataObject
) -> None:
    """The clocks agree on shared devices, shared links and message ops, too."""
    costs = data.draw(costs_for(schedule.program))

    assert_is_as_slow_clock_says(schedule, costs)


@many
@given(schedule=orders(max_streams=1, explicit=False), data=st.data())
def test_both_clocks_give_the_same_times(
    schedule: Schedule, data: st.DataObject
) -> None:
    """To the last bit, also where floats must be rounded."""
    drawn = data.draw(costs_for(schedule.program, shared=False))
    third = replace(drawn, op_s=1 / 3, handling=replace(drawn.handling, latency_s=0.1))
    for gates in ((), gates_of(schedule, clips=False)):
        if not early_updates(schedule, gates):
            work = prepare(schedule, third, gates)
            assert is_decided_by_lanes(work)
            first, second = play_in_order(work), play_events(work, third)
            assert all(map(np.array_equal, first.times, second.times))
            assert first.reduced_s == second.reduced_s


@many
@given(schedule=orders(explicit=False), data=st.data())
def test_an_update_waits_for_its_gate(schedule: Schedule, data: st.DataObject) -> None:
    """It starts once all of its gate's gradients are there, and no other op does."""
    gates = gates_of(schedule, clips=True)
    assume(not early_updates(schedule, gates))
    costs = data.draw(costs_for(schedule.program))
    program, gate_of = schedule.program, stage_gates(gates)

    timeline = simulate(schedule, costs, gates)

    ends_s: dict[Value, float] = {}
    for span in timeline.spans:
        ends_s |= dict.fromkeys(makes(span.op, program), span.end_s)
    for span in timeline.spans:
        if span.op.kind is Kind.UPDATE:
            for one in with_gate(span.op, gate_of):
                needed = (x for x in needs(one, program) if not is_given(x))
                assert all(ends_s[x] <= span.start_s for x in needed)
    alone = tuple((stage,) for gate in gates for stage in gate)
    assert_same_times(simulate(schedule, costs, alone), simulate(schedule, costs))


def assert_same_times(first: Timeline, second: Timeline) -> None:
    """Of every op."""
    for name in ("start_s", "end_s"):
        for a, b in zip(getattr(first, name), getattr(second, name), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_device_that_is_done_early_waits_at_the_gate() -> None:
    """1F1B: the last device's backwards end 2 (p - 1) before those of the first."""
    order = make_schedule("1f1b", num_devices=4, num_microbatches=4)
    each = StageCost(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, update_s=0.5)
    costs = Costs((each,) * 4)
    ends_s = [float(x[-2]) for x in simulate(order, costs).end_s]
    assert ends_s == [21.0, 19.0, 17.0, 15.0]

    waiting = simulate(order, costs, gates_of(order, clips=False))

    assert [float(x[-1]) for x in waiting.start_s] == [21.0] * 4
    assert [float(x[-2]) for x in waiting.end_s] == ends_s


def test_an_order_that_no_gate_allows_is_named() -> None:
    """The update waits for a gradient that its own lane makes behind it."""
    order = Schedule.parse("d0  0F0 1F0 1B0 1U 0B0 0U")
    with pytest.raises(DeadlockError, match="1U and waits for 0B0, whose gradient is"):
        simulate(order, Costs.uniform(), ((0, 1),))


@pytest.mark.parametrize(
    ("link", "decided"),
    [
        (Link(1.0, 1.0), True),
        (Link(1.0, name="card"), True),  # nothing takes time on it
        (Link(1.0, 1.0, "card"), False),
    ],
)
def test_fast_clock_is_for_links_of_one_sender(link: Link, *, decided: bool) -> None:
    """Or on which messages never wait for each other."""
    cost = StageCost(1.0, output_bytes=1, input_grad_bytes=1)
    schedule = Schedule.parse("d0  0F0 0B0 0U\nd1  1F0 1B0 1U")

    assert is_decided_by_lanes(prepare(schedule, Costs((cost, cost), link=link))) == (
        decided
    )


@many
@given(schedule=orders(explicit=False))
def test_random_orders_may_run(schedule: Schedule) -> None:
    """What the tests above stand on: all ops are there, and all lanes end.

    Their lanes may add to one gradient at once, which changes no time.
    """
    assert not list(op_faults(schedule))
    assert not play(prepare(schedule, Costs.uniform()), schedule.num_ops).stuck


def assert_is_as_slow_clock_says(schedule: Schedule, costs: Costs) -> None:
    """Compare start and end of every op and message."""
    slow = SlowClock(schedule, costs)
    slow.run()

    timeline = simulate(schedule, costs)

    for i, lane in enumerate(schedule.lanes):
        places = [(i, j) for j in range(len(lane.ops))]
        assert timeline.start_s[i].tolist() == [slow.start[place] for place in places]
        assert timeline.end_s[i].tolist() == [slow.end[place] for place in places]
    expected = sorted(
        (m.maker, m.to_device, m.start, m.end, m.num_bytes) for m in slow.messages
    )
    traffic = timeline.traffic
    messages = traffic.from_device != traffic.to_device
    columns = np.column_stack(
        (
            traffic.lane,
            traffic.position,
            traffic.to_device,
            traffic.start_s,
            traffic.end_s,
            traffic.num_bytes,
        )
    )
    found = sorted(((a, b), *rest) for a, b, *rest in columns[messages].tolist())
    assert found == expected
