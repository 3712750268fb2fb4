"""Every device can post its messages in one queue, where each blocks all behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.core.check import check
from hocket.core.checker.links import Links, check_queues
from hocket.core.plans.lane_plan import OpPlan, plan_lanes, plan_portions
from hocket.core.plans.message_order import Group, Queue, plan_queues
from hocket.core.schedule import Schedule
from hocket.errors import DeadlockError, PlanError, ScheduleError
from hocket.passes.add_messages import add_messages
from hocket.passes.split_backward import split_backward
from hocket.schedules import make_schedule

ONE_STEP = ["1f1b", "gpipe", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-v"]
FLUSH_FREE = ["pipedream-2bw", "wpipe", "wpipe-overlapped"]


def queues_of(schedule: Schedule) -> dict[int, Queue]:
    """The planned queue of each device, for the whole schedule."""
    return plan_queues(plan_lanes(schedule), [lane.device for lane in schedule.lanes])


def text(queue: Queue, device: int) -> str:
    """Ops, and groups of messages in brackets: > for a send, < for a receive."""
    return " ".join(
        str(item.op) if isinstance(item, OpPlan) else f"[{group_text(item, device)}]"
        for item in queue
    )


def group_text(group: Group, device: int) -> str:
    """`>y0.1 <dx1.0`: the stage and microbatch of each value."""
    return " ".join(
        f"{'>' if m.from_device == device else '<'}"
        f"{m.value.fact.value}{m.value.stage}.{m.value.microbatch}"
        for m in group
    )


def groups_in(queue: Queue) -> Iterator[tuple[int, Group]]:
    """The groups of a queue, with their places."""
    for place, item in enumerate(queue):
        if not isinstance(item, OpPlan):
            yield place, item


def test_sends_follow_their_op_and_receives_stand_before_theirs() -> None:
    """The order by which Megatron-LM runs 1F1B: what crosses is exchanged at once."""
    queues = queues_of(make_schedule("1f1b", num_devices=2, num_microbatches=3))

    assert text(queues[0], 0) == (
        "0F0 [>y0.0] 0F1 [>y0.1 <dx1.0] 0B0 0F2 [>y0.2 <dx1.1] 0B1 [<dx1.2] 0B2 0U"
    )
    assert text(queues[1], 1) == (
        "[<y0.0] 1F0 1B0 [<y0.1 >dx1.0] 1F1 1B1 [<y0.2 >dx1.1] 1F2 1B2 [>dx1.2] 1U"
    )


def test_a_ring_of_sends_has_an_order() -> None:
    """Past design: each device sends first, and with three of them no two cross."""
    schedule = make_schedule(
        "looped-bfs", num_devices=3, num_microbatches=3, stages_per_device=2
    )
    check(schedule, links=Links.ONE_QUEUE)


@pytest.mark.parametrize("name", ONE_STEP)
def test_a_lone_receive_stands_before_the_op_that_needs_it(name: str) -> None:
    """A posted receive is a kernel that spins: it has no place before other ops."""
    queues = queues_of(make_schedule(name, num_devices=4, num_microbatches=8))
    num_lone = 0
    for device, queue in queues.items():
        for group, op in pairwise(queue):
            if isinstance(group, OpPlan) or not isinstance(op, OpPlan):
                continue
            if all(m.to_device == device for m in group):
                assert set(op.receives) & set(group)
                num_lone += 1
    assert num_lone > 0


@settings(max_examples=20)
@given(
    name=st.sampled_from(FLUSH_FREE),
    p=st.sampled_from([2, 4]),
    num_bodies=st.integers(0, 3),
)
def test_portions_together_come_to_an_end(name: str, p: int, num_bodies: int) -> None:
    """A body has one order, so no rank must know how often it will be played.

    When a portion ends, its messages have arrived.
    """
    schedule = make_schedule(name, num_devices=p, num_microbatches=2 * p, num_steps=9)
    devices = [lane.device for lane in schedule.lanes]
    prologue, body, epilogue = (
        plan_queues(lanes, devices) for lanes in plan_portions(schedule)[1:]
    )
    for part in (prologue, *[body] * num_bodies, epilogue):
        check_queues(part)
        sent = {
            m for queue in part.values() for _, group in groups_in(queue) for m in group
        }
        made = {
            m
            for queue in part.values()
            for item in queue
            if isinstance(item, OpPlan)
            for m in item.sends
        }
        assert sent == made


@settings(max_examples=60)
@given(data=st.data(), name=st.sampled_from(ONE_STEP), splits=st.booleans())
def test_a_swap_at_one_end_is_found(
    data: st.DataObject, name: str, *, splits: bool
) -> None:
    """NCCL would fill one message with the bytes of the other, or wait for ever."""
    schedule = make_schedule(name, num_devices=2, num_microbatches=4)
    if splits and not name.startswith("zb"):
        schedule = split_backward(schedule)
    queues = queues_of(schedule)
    queue = queues[data.draw(st.sampled_from([0, 1]))]
    places = [place for place, _ in groups_in(queue)]
    i, j = data.draw(st.sampled_from([*pairwise(places)]))
    queue[i], queue[j] = queue[j], queue[i]

    with pytest.raises(ScheduleError, match="devices 0 and 1"):
        check_queues(queues)


COPIES = """
steps 1
net down microbatches=2
net up microbatches=2
stage 0 net=down device=0
stage 1 net=down device=1
stage 2 net=up device=1
stage 3 net=up device=0
flow 0>1
flow 2>3
copies 0 2
copies 1 3
d0  3F0 3F1 3B0 3B1 0F0 0F1 0B0 0B1 0R 3R 3U 0U
d1  2F0 2F1 2B0 2B1 2R 1F0 1F1 1B0 1B1 1R 1U 2U
"""


def test_a_sum_over_copies_holds_up_what_its_member_waits_for() -> None:
    """2R waits for 0R, which needs dx1.1; only behind 2R does 1B1 make it."""
    early = Schedule.parse(COPIES)
    check(early)  # 2R starts, and 1F0 goes on beside it
    with pytest.raises(DeadlockError, match="each waits") as caught:
        check(early, links=Links.ONE_QUEUE)
    assert "2R" in str(caught.value)

    late = COPIES.replace("2R 1F0 1F1 1B0 1B1", "1F0 1F1 1B0 1B1 2R")
    check(Schedule.parse(late), links=Links.ONE_QUEUE)


def test_a_planted_deadlock_is_named() -> None:
    """Each device sends before it receives, and no group joins the two."""
    queues = queues_of(make_schedule("1f1b", num_devices=2, num_microbatches=2))
    (crossing,) = (group for _, group in groups_in(queues[0]) if len(group) == 2)
    output = next(m for m in crossing if m.from_device == 0)
    gradient = next(m for m in crossing if m.from_device == 1)
    _replace(queues[0], crossing, [(output,), (gradient,)])
    _replace(queues[1], crossing, [(gradient,), (output,)])

    with pytest.raises(ScheduleError) as caught:
        check_queues(queues)

    assert "group 1 of the messages between devices 0 and 1" in str(caught.value)
    assert "the send of y[stage 0, microbatch 1] to device 1" in str(caught.value)
    assert "the send of dx[stage 1, microbatch 0] to device 0" in str(caught.value)


def test_a_receive_posted_too_early_is_a_deadlock() -> None:
    """The kernel of a receive spins before the forward that its sender waits for."""
    queues = queues_of(make_schedule("1f1b", num_devices=2, num_microbatches=1))
    gradient = next(item for item in queues[0] if text([item], 0) == "[<dx1.0]")
    queues[0].remove(gradient)
    queues[0].insert(1, gradient)  # after 0F0, before its send
    queues[1].remove(gradient)
    queues[1].insert(0, gradient)

    with pytest.raises(DeadlockError) as caught:
        check_queues(queues)

    assert "d0 stands at the receive of dx[stage 1, microbatch 0] from device 1" in (
        str(caught.value)
    )
    assert "after 0F0" in str(caught.value)


def test_a_forgotten_message_is_named() -> None:
    """At one end: the other would wait for ever."""
    queues = queues_of(make_schedule("1f1b", num_devices=2, num_microbatches=1))
    place, _ = next(groups_in(queues[1]))
    del queues[1][place]

    with pytest.raises(ScheduleError, match=r"device 1 posts y\[.*\], .* 0 times"):
        check_queues(queues)


def test_explicit_messages_have_an_order_already() -> None:
    """It says which pass removes them."""
    schedule = make_schedule("1f1b", num_devices=2, num_microbatches=2)
    with pytest.raises(PlanError, match="drop_messages"):
        check(add_messages(schedule), links=Links.ONE_QUEUE)


def _replace(queue: Queue, group: Group, by: Sequence[Group]) -> None:
    place = queue.index(group)
    queue[place : place + 1] = by
