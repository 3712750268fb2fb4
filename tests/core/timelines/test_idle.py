"""Every idle second has one cause: closed forms, and sums for any schedule."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.core.costs import Costs, Link, StageCost
from hocket.core.gates import gates_of
from hocket.core.simulate import observed, simulate
from hocket.core.timelines.causality import PathKind, critical_path
from hocket.core.timelines.idle import Cause, Idle, idle_by_cause
from hocket.core.timelines.timeline import DataWait, Origin, Timeline
from hocket.schedules import SCHEDULES, make_schedule
from tests.strategies import shapes


def idle_of(name: str, p: int, m: int, costs: Costs, **sizes: int) -> Idle:
    """The idle time of a simulated schedule."""
    schedule = make_schedule(name, num_devices=p, num_microbatches=m, **sizes)
    return idle_by_cause(simulate(schedule, costs))


@given(p=st.integers(1, 6), m=st.integers(1, 12), backward=st.sampled_from([0.5, 2.0]))
def test_1f1b_with_equal_stages_only_warms_up_and_drains(
    p: int, m: int, backward: float
) -> None:
    """Each lane stands still for (p - 1) (F + B), which is (p - 1) / m of its work."""
    costs = Costs.uniform(input_grad_s=backward / 2, weight_grad_s=backward / 2)
    idle = idle_of("1f1b", p, m, costs)

    for lane in range(p):
        expected = dict.fromkeys(Cause, 0.0) | {Cause.FILL: (p - 1) * (1 + backward)}
        assert idle.lane_s(lane) == pytest.approx(expected)


def test_messages_of_one_microbatch_are_waited_for_by_all() -> None:
    """One microbatch goes there and back over p - 1 links: all lanes wait for each."""
    p = 4
    idle = idle_of("1f1b", p, 1, Costs.uniform(message_s=0.25))

    for lane in range(p):
        seconds = idle.lane_s(lane)
        assert seconds[Cause.MESSAGE] == pytest.approx(2 * (p - 1) * 0.25)
        assert seconds[Cause.FILL] == pytest.approx(3.0 * (p - 1))
        links = {
            (idle.timeline.schedule.lanes[wait.lane].device, wait.to_device)
            for wait in idle.waits[lane]
            if wait.cause is Cause.MESSAGE and wait.lane is not None
        }
        there = {(a, a + 1) for a in range(p - 1)}
        assert links == there | {(b, a) for a, b in there}


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_less_work_than_the_slowest_stage_is_imbalance(slow: int) -> None:
    """A stage that takes x longer lets all others wait for m x."""
    m, x = 12, 0.5
    stages = [StageCost(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0)] * 3
    stages[slow] = replace(stages[slow], forward_s=1.0 + x)
    idle = idle_of("1f1b", 3, m, Costs(tuple(stages)))

    for lane in range(3):
        expected = 0.0 if lane == slow else m * x
        assert idle.lane_s(lane)[Cause.IMBALANCE] == pytest.approx(expected)


def test_a_reduction_is_waited_for_before_the_update() -> None:
    """One device in four replicas: a ring takes 2 (r - 1) latencies."""
    costs = replace(Costs.uniform(update_s=1.0), reduce_link=Link(latency_s=0.5))
    idle = idle_of("1f1b", 1, 3, costs, num_replicas=4)

    assert idle.lane_s(0)[Cause.REDUCTION] == pytest.approx(2 * 3 * 0.5)
    assert max(Cause, key=idle.seconds.__getitem__) is Cause.REDUCTION


def test_a_lane_waits_for_the_reason_of_the_lane_it_waits_for() -> None:
    """Device 2 waits for device 1, which waits for the message from device 0."""
    idle = idle_of("1f1b", 3, 1, Costs.uniform(message_s=10.0))
    first, second, third, *_ = idle.waits[2]

    assert (first.cause, first.lane, first.end_s) == (Cause.FILL, 0, 1.0)
    assert (second.cause, second.lane, second.to_device) == (Cause.MESSAGE, 0, 1)
    assert (third.cause, third.lane, third.start_s) == (Cause.FILL, 1, 11.0)


def test_a_wait_for_the_gate_is_drain() -> None:
    """Updates of a step wait for all gradients: that is no time of the host."""
    order = make_schedule("1f1b", num_devices=4, num_microbatches=4)
    costs = Costs.uniform(update_s=0.1)
    free = idle_by_cause(simulate(order, costs))
    gated = idle_by_cause(simulate(order, costs, gates_of(order, clips=False)))

    assert gated.seconds[Cause.HOST] == pytest.approx(0.0)
    for lane in range(4):
        assert gated.lane_s(lane)[Cause.FILL] == pytest.approx(
            free.lane_s(lane)[Cause.FILL]
        )


def test_handling_messages_is_the_hosts_time() -> None:
    """A lane spends it on each message that it reads, before the op that needs it."""
    m, handling_s = 4, 0.125
    costs = replace(Costs.uniform(), handling=Link(latency_s=handling_s))
    idle = idle_of("1f1b", 2, m, costs)

    for lane in range(2):
        assert idle.lane_s(lane)[Cause.HOST] >= m * handling_s - 1e-9


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@given(data=st.data())
@settings(max_examples=10)
def test_causes_add_up_to_the_bubble(name: str, data: st.DataObject) -> None:
    """For every lane of every schedule, whatever its costs."""
    costs = replace(
        Costs.uniform(message_s=0.3, update_s=0.2, weight_grad_s=0.7),
        reduce_link=Link(latency_s=0.4),
        handling=Link(latency_s=0.01),
        op_s=0.02,
        jitter=0.1,
    )
    shape = data.draw(shapes(name))
    timeline = simulate(SCHEDULES[name].make(shape), costs)
    devices = range(timeline.schedule.program.num_devices)
    late = DataWait(data.draw(st.sampled_from(devices)), -0.5, 0.0)
    timeline = replace(timeline, data_waits=(late,))
    idle = idle_by_cause(timeline)

    for lane in range(len(timeline.schedule.lanes)):
        total_s = sum(idle.lane_s(lane).values())
        share = timeline.lane_bubble_fraction(lane)
        assert total_s == pytest.approx(share * timeline.makespan_s, abs=1e-9)
        waits = idle.waits[lane]
        assert all(a.end_s <= b.start_s for a, b in pairwise(waits))
    assert sum(idle.fractions.values()) == pytest.approx(timeline.bubble_fraction)


@given(p=st.integers(1, 5), m=st.integers(1, 6))
def test_all_wait_for_the_batch_that_the_first_stage_reads(p: int, m: int) -> None:
    """The step is longer by the wait, on every lane and on the critical path."""
    step = simulate(
        make_schedule("1f1b", num_devices=p, num_microbatches=m), Costs.uniform()
    )
    timeline = replace(step, data_waits=(DataWait(0, -2.5, 0.0),))
    idle = idle_by_cause(timeline)

    assert timeline.makespan_s == step.makespan_s + 2.5
    for lane in range(p):
        expected = idle_by_cause(step).lane_s(lane) | {Cause.DATA: 2.5}
        assert idle.lane_s(lane) == pytest.approx(expected)
    assert critical_path(timeline).seconds[PathKind.DATA] == 2.5


def late(timeline: Timeline, costs: Costs, by_s: float) -> Timeline:
    """The same steps as measured, where each lane begins every op later."""
    starts = [start_s + np.arange(len(start_s)) * by_s for start_s in timeline.start_s]
    ends = [end_s + np.arange(len(end_s)) * by_s for end_s in timeline.end_s]
    return observed(timeline.schedule, costs, starts, ends, Origin.MEASURED)


def test_a_measured_timeline_knows_the_host_from_messages() -> None:
    """Gaps before ops that need no message, as GPipe's forwards, are the host's."""
    costs = Costs.uniform(message_s=0.1)
    schedule = make_schedule("gpipe", num_devices=2, num_microbatches=8)
    predicted = simulate(schedule, costs)
    measured = late(predicted, costs, 0.05)
    idle = idle_by_cause(measured)

    assert sum(idle.fractions.values()) == pytest.approx(measured.bubble_fraction)
    assert idle.lane_s(0)[Cause.HOST] >= 7 * 0.05 - 1e-9
    assert idle.lane_s(0)[Cause.MESSAGE] < 0.5

    before_s, after_s = measured.end_s[0][2], measured.start_s[0][3]
    waits = (DataWait(0, before_s - 0.01, before_s + 0.02),)
    explained = idle_by_cause(replace(measured, data_waits=waits)).lane_s(0)
    assert after_s - before_s >= 0.05 - 1e-9
    assert explained[Cause.DATA] == pytest.approx(0.02)
    assert explained[Cause.HOST] == pytest.approx(idle.lane_s(0)[Cause.HOST] - 0.02)
