"""Lane plans hold every wait, message and event that dataflow asks for."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.core.dataflow import Fact, Value, is_given, makes, needs, reads
from hocket.core.op import ASYNCHRONOUS, Kind
from hocket.core.plans.lane_plan import Message, OpPlan, plan_lanes
from hocket.core.program import Program
from hocket.core.schedule import Lane, Schedule
from hocket.errors import PlanError
from hocket.passes.add_messages import add_messages
from hocket.schedules import make_schedule
from tests.strategies import lane_orders

BUFFERED = (Fact.OUTPUT, Fact.INPUT_GRAD, Fact.LOSS_GRAD, Fact.GATHERED)

SPLIT = """
d0    0F0 0I0 0U
d0.1  0W0
d1    1F0 1I0 1W0 1U
"""


def plan_of(text: str) -> dict[str, OpPlan]:
    """The plan of each op of a schedule, by the op's text."""
    plans = plan_lanes(Schedule.parse(text))
    return {str(plan.op): plan for lane in plans for plan in lane}


@given(lane_orders())
def test_every_need_is_made_in_the_lane_or_waited_for_or_received(
    schedule: Schedule,
) -> None:
    """A value that none of the three brings would be read before it exists."""
    for lane in plan_lanes(schedule):
        there: set[Value] = set()
        for plan in lane:
            there.update(plan.waits)
            there.update(message.value for message in plan.receives)
            needed = needs(plan.op, schedule.program)
            assert all(is_given(value) or value in there for value in needed)
            if plan.op.kind not in ASYNCHRONOUS:
                there.update(makes(plan.op, schedule.program))


@given(lane_orders())
def test_every_message_has_one_sender_and_crosses_once(schedule: Schedule) -> None:
    """A value goes to a device once, however many ops and lanes read it there."""
    plans = plan_lanes(schedule)
    sent = Counter(m for lane in plans for plan in lane for m in plan.sends)
    received = {m for lane in plans for plan in lane for m in plan.receives}
    crossings = Counter((m.value, m.to_device) for m in sent)

    assert set(sent) == received
    assert max([*sent.values(), *crossings.values()], default=1) == 1


@given(lane_orders())
def test_messages_go_along_flows(schedule: Schedule) -> None:
    """Outputs go along a flow of the program, gradients against one."""
    for lane in plan_lanes(schedule):
        for message in (m for plan in lane for m in plan.sends):
            assert message.flows
            for a, b in message.flows:
                flow = (a, b) if message.value.fact is Fact.OUTPUT else (b, a)
                assert flow in schedule.program.flows


@given(lane_orders())
def test_every_event_is_recorded_once_and_waited_for(schedule: Schedule) -> None:
    """A lane records exactly those events that another lane waits for."""
    plans = plan_lanes(schedule)
    recorded = Counter(v for lane in plans for plan in lane for v in plan.records)
    waited = {v for lane in plans for plan in lane for v in plan.waits}

    assert set(recorded) == waited
    assert set(recorded.values()) <= {1}


@given(lane_orders(), st.randoms(use_true_random=False))
def test_lanes_played_by_plan_alone_find_all_they_read(
    schedule: Schedule, rng: random.Random
) -> None:
    """Whatever lane goes first, no value is read before it is made or has arrived."""
    plans = plan_lanes(schedule)
    device = [lane.device for lane in schedule.lanes]
    position = [0] * len(plans)
    events: set[Value] = set()
    there: dict[int, set[Value]] = {d: set() for d in device}
    while any(map(len, plans)) and position != [len(lane) for lane in plans]:
        ready = [
            i
            for i, lane in enumerate(plans)
            if position[i] < len(lane)
            and _can_start(lane[position[i]], events, there[device[i]])
        ]
        i = rng.choice(ready)
        plan = plans[i][position[i]]
        position[i] += 1
        for value in reads(plan.op, schedule.program):
            assert value.fact not in BUFFERED or value in there[device[i]]
        there[device[i]].update(makes(plan.op, schedule.program))
        for message in plan.sends:
            there[message.to_device].add(message.value)
        events.update(plan.records)


def _can_start(plan: OpPlan, events: set[Value], there: set[Value]) -> bool:
    arrived = all(message.value in there for message in plan.receives)
    return arrived and events.issuperset(plan.waits)


def test_a_side_lane_waits_for_an_event_and_the_update_waits_for_it() -> None:
    """W in a lane of its own needs dx of I, and U needs dw of W."""
    plans = plan_of(SPLIT)

    dx, dw = Value(Fact.INPUT_GRAD, 0, 0, 0), Value(Fact.WEIGHT_GRAD, 0, 0, 0)
    assert plans["0I0"].records == (dx,)
    assert plans["0W0"].waits == (dx,)
    assert plans["0W0"].records == (dw,)
    assert plans["0U"].waits == (dw,)


def test_a_reduction_is_waited_for_even_in_its_own_lane() -> None:
    """R only starts a collective: the lane goes on before the result is there."""
    plans = plan_of("d0 0F0 0B0 0R 0U")

    reduced = Value(Fact.REDUCED_GRAD, 0, None, 0)
    assert plans["0R"].records == (reduced,)
    assert plans["0U"].waits == (reduced,)


def test_one_message_serves_all_stages_of_the_receiving_device() -> None:
    """Stages 1 and 2 read the output of stage 0 on one device: it crosses once."""
    chain = Program.chain([0, 1, 1], 1)
    program = Program(chain.nets, chain.stages, (*chain.flows, (0, 2)))
    text = Schedule.parse("d0 0F0 0B0 0U\nd1 1F0 2F0 2B0 1B0 1U 2U")
    schedule = Schedule(program, text.lanes)
    plans = {str(plan.op): plan for lane in plan_lanes(schedule) for plan in lane}

    forth = Message(Value(Fact.OUTPUT, 0, 0, 0), 0, 0, 1, ((0, 1), (0, 2)))
    assert plans["0F0"].sends == plans["1F0"].receives == (forth,)
    assert plans["2F0"].receives == ()
    back = [m.flows for m in plans["0B0"].receives]
    assert back == [((1, 0),), ((2, 0),)]


def test_refuses_messages_that_are_ops() -> None:
    """They would be sent twice."""
    schedule = make_schedule("gpipe", num_devices=2, num_microbatches=2)

    with pytest.raises(PlanError, match="drop_messages"):
        plan_lanes(add_messages(schedule))


def test_lanes_may_be_empty() -> None:
    """A lane without ops has an empty plan."""
    schedule = Schedule.parse("d0 0F0 0B0 0U")
    more = Schedule(schedule.program, (*schedule.lanes, Lane(0, 1, ())))

    assert plan_lanes(more)[1] == ()
    assert [plan.op.kind for plan in plan_lanes(more)[0]] == [
        Kind.FORWARD,
        Kind.BACKWARD,
        Kind.UPDATE,
    ]
