"""Messages in schedules: complete, in time, and in one order at both ends."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hocket.core.check import check
from hocket.core.costs import Costs
from hocket.core.dataflow import needs
from hocket.core.op import BACKWARDS, MESSAGES, RECEIVES, SENDS, Kind, Op
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.errors import DeadlockError, PlanError
from hocket.passes.add_messages import add_messages, drop_messages
from hocket.schedules import make_schedule
from tests.player import ends_with_messages
from tests.strategies import orders

ORDERS: Final = Path(__file__).parent.parent / "core" / "orders"
FLUSH_FREE: Final = ["wpipe", "tspipe"]

many = settings(suppress_health_check=[HealthCheck.too_slow])


def order_in(name: str) -> Schedule:
    """A flush-free order, from its file."""
    return Schedule.parse((ORDERS / f"{name}.txt").read_text())


def values_that_travel(schedule: Schedule) -> int:
    """How many values are needed by an op of another device, by stage that needs it."""
    stages = schedule.program.stages
    return sum(
        stages[value.stage].device != lane.device
        for lane in schedule.lanes
        for op in lane.ops
        for value in needs(op, schedule.program)
    )


def posted(schedule: Schedule) -> dict[tuple[int, int], list[str]]:
    """What each device posts toward each other one, as the send that it belongs to."""
    posts = defaultdict(list)
    for lane in schedule.lanes:
        for op in lane.ops:
            if op.peer is None:
                continue
            other = schedule.program.stages[op.peer].device
            stages = (op.stage, op.peer) if op.kind in SENDS else (op.peer, op.stage)
            forth = op.kind in {Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD}
            message = f"{'FB'[not forth]} {stages} {op.microbatch} {op.step}"
            posts[lane.device, other].append(message)
    return posts


def unread_at_most(schedule: Schedule) -> int:
    """The most receives of one flow that are posted and not yet read, on any lane."""
    most = 0
    for lane in schedule.lanes:
        unread: dict[tuple[Kind, int, int], set[Op]] = defaultdict(set)
        for op in lane.ops:
            if op.kind in RECEIVES:
                assert op.peer is not None
                flow = unread[op.kind, op.stage, op.peer]
                flow.add(op)
                most = max(most, len(flow))
            for (kind, stage, _), flow in unread.items():
                forward = kind is Kind.RECEIVE_FORWARD
                if op.stage != stage or (op.kind in BACKWARDS) == forward:
                    continue
                if op.kind is Kind.FORWARD or op.kind in BACKWARDS:
                    flow -= {
                        receive
                        for receive in flow
                        if (receive.microbatch, receive.step)
                        == (op.microbatch, op.step)
                    }
    return most


def test_looks_like_this() -> None:
    """A value leaves when it is made; receives stand before all that they wait for."""
    schedule = make_schedule("1f1b", num_devices=2, num_microbatches=3)
    assert str(add_messages(schedule)) == (
        "d0  0RECV_B0<1 0RECV_B1<1 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0B0 0RECV_B2<1 "
        "0F2 0SEND_F2>1 0B1 0B2 0U\n"
        "d1  1RECV_F0<0 1RECV_F1<0 1F0 1RECV_F2<0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0 "
        "1F2 1B2 1SEND_B2>0 1U"
    )


def test_with_one_channel_a_pair_posts_in_one_order() -> None:
    """Sends and receives of a shared channel are posted in one order at both ends."""
    schedule = make_schedule("1f1b", num_devices=2, num_microbatches=3)
    full = add_messages(schedule, shared_channel=True)
    assert str(full) == (
        "d0  0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0F2 0SEND_F2>1 0RECV_B1<1 "
        "0RECV_B2<1 0B1 0B2 0U\n"
        "d1  1RECV_F0<0 1RECV_F1<0 1F0 1B0 1SEND_B0>0 1RECV_F2<0 1F1 1B1 1SEND_B1>0 "
        "1F2 1B2 1SEND_B2>0 1U"
    )


@many
@given(
    schedule=orders(),
    num_buffers=st.integers(1, 3),
    shared_channel=st.booleans(),
)
@example(schedule=order_in("wpipe"), num_buffers=1, shared_channel=True)
@example(schedule=order_in("tspipe"), num_buffers=1, shared_channel=True)
def test_valid_in_valid_out(
    schedule: Schedule, num_buffers: int, shared_channel: bool
) -> None:
    """Any order of any program stays right, comes to its end, and is found again."""
    full = add_messages(
        schedule, num_buffers=num_buffers, shared_channel=shared_channel
    )
    check(full)
    assert ends_with_messages(full, shared_channel=shared_channel)
    assert drop_messages(full).lanes == schedule.lanes


@many
@given(schedule=orders())
def test_each_value_travels_once_to_each_stage_that_needs_it(
    schedule: Schedule,
) -> None:
    """One send and one receive each, and none within a device."""
    ops = [op for lane in add_messages(schedule).lanes for op in lane.ops]
    num_sends = sum(op.kind in SENDS for op in ops)
    num_receives = sum(op.kind in RECEIVES for op in ops)
    assert num_sends == num_receives == values_that_travel(schedule)


@many
@given(schedule=orders(), num_buffers=st.integers(1, 3))
def test_both_ends_post_in_the_same_order(schedule: Schedule, num_buffers: int) -> None:
    """Sends and receives alike where they share a channel, as over one communicator."""
    full = add_messages(schedule, num_buffers=num_buffers, shared_channel=True)
    posts = posted(full)
    for (device, other), messages in posts.items():
        assert messages == posts[other, device]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs"])
@pytest.mark.parametrize("num_buffers", [1, 2, 3])
def test_posts_no_more_receives_than_there_are_buffers(
    name: str, num_buffers: int
) -> None:
    """A flow uses all its buffers, and never more."""
    schedule = make_schedule(name, num_devices=3, num_microbatches=6, num_steps=2)
    full = add_messages(schedule, num_buffers=num_buffers)
    assert unread_at_most(full) == num_buffers


def test_reading_in_another_order_takes_more_buffers() -> None:
    """Three values arrive before the one that is read first."""
    schedule = Schedule.parse(
        "d0  0F0 0F1 0F2 0B2 0B1 0B0 0U\nd1  1F2 1B2 1F1 1B1 1F0 1B0 1U"
    )
    full = add_messages(schedule, num_buffers=1)
    assert unread_at_most(full) == 3
    assert ends_with_messages(full)


def test_a_loss_over_the_batch_reads_many_at_once() -> None:
    """A whole-batch loss needs a buffer for each of the other net's microbatches."""
    header = (
        "net teacher microbatches=3\nnet student microbatches=2 loss=batch\n"
        "stage 0 net=teacher device=0 trainable=no\nstage 1 net=student device=1\n"
        "flow 0>1\n"
    )
    schedule = Schedule.parse(f"{header}d0  0F0 0F1 0F2\nd1  1F0 1F1 1L 1B0 1B1 1U")
    full = add_messages(schedule, num_buffers=1)
    assert ends_with_messages(full)
    receives = "1RECV_F0<0 1RECV_F1<0 1RECV_F2<0"
    assert str(full).splitlines()[-1] == f"d1  {receives} 1F0 1F1 1L 1B0 1B1 1U"


@pytest.mark.parametrize("name", FLUSH_FREE)
@pytest.mark.parametrize("shared_channel", [False, True])
def test_a_body_keeps_repeating(name: str, shared_channel: bool) -> None:
    """A body stays, without a few repetitions at its ends that differ in messages."""
    schedule = order_in(name).with_num_steps(12)
    full = add_messages(schedule, shared_channel=shared_channel)
    check(full)
    assert full.num_repeats >= schedule.num_repeats - 3
    assert Schedule.parse(str(full)) == full
    timelines = [simulate(order, Costs.uniform()) for order in (schedule, full)]
    plain, with_messages = (timeline.steady_bubble_fraction for timeline in timelines)
    assert with_messages == pytest.approx(plain)


@pytest.mark.parametrize("name", FLUSH_FREE)
def test_a_body_stays_where_it_was_when_messages_go(name: str) -> None:
    """Dropping finds the repetitions that are left."""
    schedule = order_in(name).with_num_steps(6)
    dropped = drop_messages(add_messages(schedule))
    assert dropped.lanes == schedule.lanes
    for (begin, end), (old_begin, old_end) in zip(
        dropped.body, schedule.body, strict=True
    ):
        assert old_begin <= begin < end <= old_end
    check(dropped)


def test_the_next_step_is_received_before_this_one_ends() -> None:
    """The first messages of a step are awaited while the last update runs."""
    schedule = make_schedule("1f1b", num_devices=2, num_microbatches=2, num_steps=2)
    ops = [str(op) for op in add_messages(schedule).lanes[1].ops]
    assert ops.index("1RECV_F0<0@1") < ops.index("1B1") < ops.index("1U")


def test_one_device_needs_no_messages() -> None:
    """Its stages speak to each other in memory."""
    schedule = make_schedule(
        "interleaved-1f1b", num_devices=1, num_microbatches=2, stages_per_device=3
    )
    assert add_messages(schedule) == schedule


def test_lanes_of_one_device_share_their_memory() -> None:
    """A value that one stream makes for another is no message."""
    schedule = Schedule.parse("d0  0F0 0I0 0U\nd0.1  0W0\nd1  1F0 1I0 1U\nd1.1  1W0")
    full = add_messages(schedule)
    check(full)
    held = [{op.kind for op in lane.ops} & MESSAGES for lane in full.lanes]
    assert held[0] == {Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD}
    assert held[2] == {Kind.SEND_BACKWARD, Kind.RECEIVE_FORWARD}
    assert held[1] == held[3] == set()


def test_refuses_what_has_messages_already() -> None:
    """Messages are refused in the input, since they would be there twice."""
    schedule = make_schedule("1f1b", num_devices=2, num_microbatches=2)
    with pytest.raises(PlanError, match="use drop_messages first"):
        add_messages(add_messages(schedule))


def test_refuses_to_do_without_buffers() -> None:
    """A message must arrive somewhere."""
    schedule = make_schedule("1f1b", num_devices=2, num_microbatches=2)
    with pytest.raises(PlanError, match="num_buffers is 0"):
        add_messages(schedule, num_buffers=0)


def test_refuses_what_never_ends() -> None:
    """Messages have no place where lanes wait for each other."""
    schedule = Schedule.parse("d0  0F0 0B0 0U\nd1  1B0 1F0 1U")
    with pytest.raises(DeadlockError):
        add_messages(schedule)
