"""Weight gradients in gaps: never slower, within the memory, and nothing else moves."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hocket.core.check import check
from hocket.core.costs import Costs, StageCost
from hocket.core.op import Kind, Op
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.core.timelines.timeline import Timeline
from hocket.errors import FitError, PlanError
from hocket.passes.add_messages import add_messages
from hocket.passes.delay_weight_gradients import delay_weight_gradients
from hocket.passes.split_backward import split_backward
from hocket.schedules import SCHEDULES, make_schedule
from tests.core.random_orders import costs_for
from tests.strategies import accepted, orders

WEIGHT = Kind.BACKWARD_WEIGHT
few = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])


def most_bytes(timeline: Timeline) -> float:
    """Of all devices."""
    return max(curve.peak for curve in timeline.memory)


def fixed(schedule: Schedule) -> list[list[Op]]:
    """Of each lane, what keeps its order: all but backwards, W and R."""
    moved = {Kind.BACKWARD, WEIGHT, Kind.REDUCE, Kind.BACKWARD_INPUT}
    return [[op for op in lane.ops if op.kind not in moved] for lane in schedule.lanes]


@few
@given(data=st.data())
def test_is_never_slower_and_keeps_to_the_memory(data: st.DataObject) -> None:
    """For any order that can run, and any costs."""
    schedule = data.draw(orders())
    costs = data.draw(costs_for(schedule.program))
    before = simulate(schedule, costs)
    spare = data.draw(st.sampled_from([0.0, 1.0, 4.0, float("inf")]))
    limit = most_bytes(before) + spare

    delayed = delay_weight_gradients(schedule, costs, memory_bytes=limit)

    check(delayed)
    after = simulate(delayed, costs)
    assert after.makespan_s <= before.makespan_s
    assert most_bytes(after) <= limit
    assert fixed(delayed) == fixed(schedule)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), name=st.sampled_from(sorted(SCHEDULES)))
def test_no_published_order_gets_slower(data: st.DataObject, name: str) -> None:
    """No device holds more than the limit, whether backwards are split or not."""
    shapes = [x for x in accepted(name) if x.num_devices * x.num_microbatches <= 24]
    schedule = SCHEDULES[name].make(data.draw(st.sampled_from(shapes)))
    costs = data.draw(costs_for(schedule.program))
    before = simulate(schedule, costs)

    free = simulate(delay_weight_gradients(schedule, costs), costs)
    limited = delay_weight_gradients(schedule, costs, memory_bytes=most_bytes(before))
    after = simulate(limited, costs)

    check(limited)
    assert after.makespan_s <= before.makespan_s
    assert most_bytes(after) <= most_bytes(before)
    assert free.makespan_s <= before.makespan_s


@few
@given(data=st.data(), p=st.integers(1, 5), m=st.integers(1, 8))
def test_reaches_zb_h1_from_1f1b(data: st.DataObject, p: int, m: int) -> None:
    """The order of forwards and input gradients is the same, and so is the time."""
    seconds = st.sampled_from([0.5, 1.0, 1.5, 2.0])
    costs = Costs.uniform(
        forward_s=data.draw(seconds),
        input_grad_s=data.draw(seconds),
        weight_grad_s=data.draw(seconds),
    )
    plain = make_schedule("1f1b", num_devices=p, num_microbatches=m)
    by_hand = make_schedule("zb-h1", num_devices=p, num_microbatches=m)

    delayed = delay_weight_gradients(plain, costs)

    assert simulate(delayed, costs).makespan_s <= simulate(by_hand, costs).makespan_s


@few
@given(data=st.data())
def test_weight_gradients_of_a_stage_keep_their_order(data: st.DataObject) -> None:
    """Each stage's W keep their order, so that gradients add up bit for bit."""
    name = data.draw(st.sampled_from(["1f1b", "gpipe", "interleaved-1f1b"]))
    schedule = make_schedule(name, num_devices=3, num_microbatches=6)
    costs = data.draw(costs_for(schedule.program))
    delayed = delay_weight_gradients(schedule, costs)
    for before, after in zip(
        split_backward(schedule).lanes, split_backward(delayed).lanes, strict=True
    ):
        for stage in {op.stage for op in before.ops}:
            assert [
                op for op in before.ops if (op.kind, op.stage) == (WEIGHT, stage)
            ] == [op for op in after.ops if (op.kind, op.stage) == (WEIGHT, stage)]


def test_stays_within_a_memory_between_the_two() -> None:
    """More memory is more speed, and no memory is none."""
    share = StageCost(1.0, 1.0, 1.0, activation_bytes=10, weight_grad_held_bytes=8)
    costs = Costs((share,), is_device_share=True)
    schedule = make_schedule("1f1b", num_devices=4, num_microbatches=8)
    times = {}
    for limit in (40, 44, 48, 56, 64):
        delayed = delay_weight_gradients(schedule, costs, memory_bytes=limit)
        timeline = simulate(delayed, costs)
        assert most_bytes(timeline) <= limit
        times[limit] = timeline.makespan_s
    assert times[40] <= simulate(split_backward(schedule), costs).makespan_s
    assert list(times.values()) == sorted(times.values(), reverse=True)
    assert times[64] == 8 * 3 + 3  # ZB-H1's


def test_a_memory_too_small_is_refused_with_the_smallest_that_works() -> None:
    """Which does work."""
    share = StageCost(1.0, 1.0, 1.0, activation_bytes=10, weight_grad_held_bytes=8)
    costs = Costs((share,), is_device_share=True)
    schedule = make_schedule("1f1b", num_devices=4, num_microbatches=8)
    with pytest.raises(
        FitError, match=r"device 0 .* The smallest that works is 40"
    ) as e:
        delay_weight_gradients(schedule, costs, memory_bytes=39)
    assert (e.value.device, e.value.needed_bytes, e.value.memory_bytes) == (0, 40, 39)
    delay_weight_gradients(schedule, costs, memory_bytes=e.value.needed_bytes)


def test_reductions_follow_the_last_weight_gradient() -> None:
    """Reductions move to the last W, so that they do not hold others up."""
    schedule = make_schedule(
        "interleaved-1f1b", num_devices=4, num_microbatches=8, num_replicas=2
    )
    delayed = delay_weight_gradients(schedule, Costs.uniform())
    check(delayed)
    assert (
        simulate(delayed, Costs.uniform()).makespan_s
        < simulate(schedule, Costs.uniform()).makespan_s
    )
    for lane in delayed.lanes:
        last = {op.stage: i for i, op in enumerate(lane.ops) if op.kind is WEIGHT}
        for stage, i in last.items():
            assert lane.ops[i + 1] == Op(Kind.REDUCE, stage)


def test_an_order_that_nothing_improves_is_returned_as_it_is() -> None:
    """One device has no gaps."""
    schedule = make_schedule("gpipe", num_devices=1, num_microbatches=4)
    assert delay_weight_gradients(schedule, Costs.uniform()) == schedule


def test_frozen_stages_and_evaluation_have_nothing_to_delay() -> None:
    """The pass takes every order."""
    schedule = make_schedule("forward-only", num_devices=3, num_microbatches=4)
    assert delay_weight_gradients(schedule, Costs.uniform()) == schedule


def test_refuses_messages() -> None:
    """Messages in the input are refused, and the error names the way out."""
    schedule = add_messages(make_schedule("1f1b", num_devices=2, num_microbatches=2))
    with pytest.raises(PlanError, match="use drop_messages first"):
        delay_weight_gradients(schedule, Costs.uniform())


@few
@given(schedule=orders())
def test_gaps_hold_every_weight_gradient_once(schedule: Schedule) -> None:
    """Whatever the order given: some W may stand elsewhere already."""
    assume(any(op.kind is Kind.BACKWARD for lane in schedule.lanes for op in lane.ops))
    delayed = split_backward(delay_weight_gradients(schedule, Costs.uniform()))
    wanted = Counter(op for lane in split_backward(schedule).lanes for op in lane.ops)
    assert Counter(op for lane in delayed.lanes for op in lane.ops) == wanted
