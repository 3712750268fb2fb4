"""The plainest way to play a schedule: an oracle for the simulator and the checker.

It goes round the lanes and does whatever can be done, with no idea of how to be fast.
Only what is checked by hand is in it: what an op needs comes from `dataflow`.
"""

from __future__ import annotations

from collections.abc import Mapping

from hocket.core.costs import StageCost
from hocket.core.dataflow import Value, is_given, is_sent, makes, needs
from hocket.core.op import MESSAGES, SENDS, Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Schedule

Times = dict[Op, tuple[float, float]]


def times_of(schedule: Schedule, share: StageCost, message_s: float = 0.0) -> Times:
    """Start and end of every op, in seconds; without messages among the ops.

    Args:
        schedule: with one lane per device.
        share: what a device's whole share of the model costs.
        message_s: what a value takes to another device.

    Raises:
        AssertionError: no lane can move.
    """
    program = schedule.program
    times: Times = {}
    made_s: dict[Value, float] = {}
    free_s = [0.0 for _ in schedule.lanes]
    left = [list(lane.ops) for lane in schedule.lanes]
    while any(left):
        moved = False
        for number, (lane, ops) in enumerate(zip(schedule.lanes, left, strict=True)):
            op = ops[0] if ops else None
            if op is None or not _is_ready(op, schedule, made_s):
                continue
            arrivals_s = [
                made_s[need] + message_s * is_sent(need, lane.device, program)
                for need in needs(op, program)
                if not is_given(need)
            ]
            start_s = max([free_s[number], *arrivals_s])
            num_stages = len(program.stages_on[lane.device])
            end_s = start_s + seconds_of(op, share) / num_stages
            times[ops.pop(0)] = start_s, end_s
            free_s[number] = end_s
            made_s.update(dict.fromkeys(makes(op, program), end_s))
            moved = True
        assert moved, f"no lane can move; left are {left}"
    return times


def seconds_of(op: Op, share: StageCost) -> float:
    """What an op takes where a device has one stage."""
    return {
        Kind.FORWARD: share.forward_s,
        Kind.BACKWARD: share.input_grad_s + share.weight_grad_s,
        Kind.BACKWARD_INPUT: share.input_grad_s,
        Kind.BACKWARD_WEIGHT: share.weight_grad_s,
        Kind.LOSS: share.loss_s,
        Kind.UPDATE: share.update_s,
    }.get(op.kind, 0.0)


def ends_with_messages(schedule: Schedule, *, shared_channel: bool = False) -> bool:
    """Whether a schedule with messages comes to its end over queues.

    A post never waits. Between two devices, messages go in the order in which they are
    posted: the first of the queue once both ends stand at it, as over NCCL.

    Args:
        schedule: with its messages.
        shared_channel: both directions are one queue.
    """
    program = schedule.program
    have: list[set[Value]] = [set() for _ in range(program.num_devices)]
    left = [list(lane.ops) for lane in schedule.lanes]
    posts: dict[tuple[int, int], list[Op]] = {}
    moved = True
    while moved:
        moved = False
        for lane, ops in zip(schedule.lanes, left, strict=True):
            while ops and all(
                is_given(need) or need in have[_holder(need, lane.device, program)]
                for need in needs(ops[0], program)
            ):
                op = ops.pop(0)
                have[lane.device].update(makes(op, program))
                if op.kind in MESSAGES:
                    assert op.peer is not None
                    other = program.stages[op.peer].device
                    posts.setdefault((lane.device, other), []).append(op)
                moved = True
        moved |= _deliver(posts, have, schedule, shared_channel)
    return not any(left) and not any(posts.values())


def _holder(value: Value, device: int, program: Program) -> int:
    """Where a device finds a value: with itself, unless a collective brings it."""
    if is_sent(value, device, program):
        return device
    return program.stages[value.stage].device


def _is_ready(op: Op, schedule: Schedule, made_s: Mapping[Value, float]) -> bool:
    return all(is_given(need) or need in made_s for need in needs(op, schedule.program))


def _deliver(
    posts: dict[tuple[int, int], list[Op]],
    have: list[set[Value]],
    schedule: Schedule,
    shared_channel: bool,
) -> bool:
    """Let the heads of all queues go that are posted at both ends; whether any was."""
    any_went = False
    for (source, target), sent in posts.items():
        received = posts.get((target, source), [])
        went = True
        while went:
            send, receive = _heads(sent, received, shared_channel)
            went = send is not None and receive == _other_end(send)
            if went:
                assert send is not None
                assert receive is not None
                sent.remove(send)
                received.remove(receive)
                have[target].update(_carried(send, schedule))
                any_went = True
    return any_went


def _heads(
    sent: list[Op], received: list[Op], shared_channel: bool
) -> tuple[Op | None, Op | None]:
    if shared_channel:
        heads = next(iter(sent), None), next(iter(received), None)
        return heads if heads[0] and heads[0].kind in SENDS else (None, None)
    return (
        next((op for op in sent if op.kind in SENDS), None),
        next((op for op in received if op.kind not in SENDS), None),
    )


def _other_end(send: Op) -> Op:
    forward = send.kind is Kind.SEND_FORWARD
    kind = Kind.RECEIVE_FORWARD if forward else Kind.RECEIVE_BACKWARD
    assert send.peer is not None
    return Op(kind, send.peer, send.microbatch, send.step, send.stage)


def _carried(send: Op, schedule: Schedule) -> tuple[Value, ...]:
    return needs(send, schedule.program)
