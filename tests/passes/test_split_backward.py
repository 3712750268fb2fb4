"""Splitting and merging backwards loses no op, and moves no other op."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hocket.core.check import check
from hocket.core.costs import Costs, StageCost
from hocket.core.op import MESSAGES, Kind, Op
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.errors import ShapeError
from hocket.passes.add_messages import add_messages
from hocket.passes.merge_backward import merge_backward, merge_unneeded_splits
from hocket.passes.split_backward import split_backward
from hocket.schedules import SCHEDULES, make_schedule
from tests.strategies import orders, shares

ORDERS: Final = Path(__file__).parent.parent / "core" / "orders"
FLUSH_FREE: Final = ["wpipe", "tspipe"]
HALVES: Final = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
WITH_WHOLES: Final = [
    name
    for name in sorted(SCHEDULES)
    if name in {"1f1b", "gpipe", "interleaved-1f1b", "looped-bfs"}
]

many = settings(suppress_health_check=[HealthCheck.too_slow])


def ops_of(schedule: Schedule) -> list[Op]:
    """All ops, lane by lane."""
    return [op for lane in schedule.lanes for op in lane.ops]


@pytest.mark.parametrize("name", WITH_WHOLES)
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("with_messages", [False, True])
def test_splitting_then_merging_is_nothing(
    name: str, num_replicas: int, with_messages: bool
) -> None:
    """Merging inverts splitting of whole backwards, with messages and without."""
    schedule = make_schedule(
        name, num_devices=3, num_microbatches=6, num_replicas=num_replicas, num_steps=2
    )
    if with_messages:
        schedule = add_messages(schedule)

    split = split_backward(schedule)

    assert not any(op.kind is Kind.BACKWARD for op in ops_of(split))
    assert merge_backward(split) == schedule
    check(split)


@pytest.mark.parametrize("name", FLUSH_FREE)
@pytest.mark.parametrize("with_messages", [False, True])
def test_a_repeating_body_stays_one(name: str, with_messages: bool) -> None:
    """A body is split alike in all its repetitions."""
    schedule = Schedule.parse((ORDERS / f"{name}.txt").read_text())
    if with_messages:
        schedule = add_messages(schedule)

    split = split_backward(schedule)

    assert split.num_repeats == schedule.num_repeats
    check(split)
    assert merge_backward(split) == schedule


@many
@given(schedule=orders())
def test_any_order_stays_sound(schedule: Schedule) -> None:
    """Some of its backwards may be split already; those with work between stay."""
    split, merged = split_backward(schedule), merge_backward(schedule)
    check(split)
    check(merged)
    assert merge_backward(split) == merged
    wholes = [op for op in ops_of(schedule) if op.kind is Kind.BACKWARD]
    assert len(ops_of(split)) == len(ops_of(schedule)) + len(wholes)


@many
@given(schedule=orders())
def test_all_else_keeps_its_order(schedule: Schedule) -> None:
    """Splitting changes backwards alone."""
    for before, after in zip(
        schedule.lanes, split_backward(schedule).lanes, strict=True
    ):
        halves = {*HALVES, Kind.BACKWARD}
        assert [op for op in before.ops if op.kind not in halves] == [
            op for op in after.ops if op.kind not in halves
        ]


def test_messages_leave_before_the_weight_gradient() -> None:
    """The input gradient leaves before W, which the device before does not need."""
    schedule = add_messages(
        make_schedule("1f1b", num_devices=2, num_microbatches=2), num_buffers=1
    )
    words = str(split_backward(schedule)).splitlines()[-1].split()
    assert words.index("1I0") < words.index("1SEND_B0>0") < words.index("1W0")


@given(m=st.integers(1, 8), p=st.integers(1, 4))
def test_a_split_order_is_never_slower(m: int, p: int) -> None:
    """Splitting makes gradients arrive sooner, and adds no work."""
    schedule = make_schedule("1f1b", num_devices=p, num_microbatches=m)
    costs = Costs.uniform(message_s=0.25)
    whole, split = (
        simulate(order, costs).makespan_s
        for order in (schedule, split_backward(schedule))
    )
    # Each device but the first no longer waits for the W of those behind it.
    assert split <= whole
    assert split < whole or p == 1


def test_work_between_i_and_w_keeps_them_split() -> None:
    """Merging never moves an op past another one."""
    schedule = Schedule.parse("d0  0F0 0I0 0F1 0W0 0I1 0W1 0U")
    assert str(merge_backward(schedule)) == "d0  0F0 0I0 0F1 0W0 0B1 0U"


def test_a_merged_backward_sends_when_all_of_it_is_done() -> None:
    """The messages of I follow B."""
    schedule = make_schedule("1f1b", num_devices=2, num_microbatches=2)
    merged = merge_backward(add_messages(split_backward(schedule)))
    check(merged)
    assert not any(op.kind in HALVES for op in ops_of(merged))
    assert sum(op.kind in MESSAGES for op in ops_of(merged)) == 2 * 4


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@given(
    p=st.sampled_from([1, 2, 4]), share=shares(), message_s=st.sampled_from([0.0, 0.5])
)
@settings(max_examples=10)
def test_merging_where_no_device_waits_changes_no_time(
    name: str, p: int, share: StageCost, message_s: float
) -> None:
    """Merging keeps every schedule's makespan, and raises no peak."""
    try:
        schedule = make_schedule(name, num_devices=p, num_microbatches=8)
    except ShapeError:
        return
    costs = Costs(
        (share,), is_device_share=True, link=Costs.uniform(message_s=message_s).link
    )
    merged = merge_unneeded_splits(schedule)
    check(merged)
    before, after = simulate(schedule, costs), simulate(merged, costs)
    assert after.makespan_s == pytest.approx(before.makespan_s)
    for device in range(p):
        assert after.peak_activations(device) <= before.peak_activations(device)


def test_the_first_stage_has_no_i_and_w_left_that_follow_each_other() -> None:
    """The first stage of ZB-V has B alone, and the third all but one."""
    merged = merge_unneeded_splits(
        make_schedule("zb-v", num_devices=2, num_microbatches=8)
    )
    kinds = {stage: Counter[Kind]() for stage in range(4)}
    for op in ops_of(merged):
        kinds[op.stage][op.kind] += 1
    assert kinds[0][Kind.BACKWARD] == 8
    assert kinds[2][Kind.BACKWARD] == 7
    assert kinds[1][Kind.BACKWARD] == kinds[3][Kind.BACKWARD] == 0
