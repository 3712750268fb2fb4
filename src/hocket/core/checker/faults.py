"""What is wrong with the ops of a schedule, each taken by itself or with its pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hocket.core.dataflow import due_ops
from hocket.core.op import MESSAGES, SENDS, Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Schedule

Fault = tuple[str, Op | None]


def too_much_due(schedule: Schedule) -> list[Fault]:
    """A header may claim any number of ops; then they are not listed one by one."""
    program = schedule.program
    num_forwards = program.num_steps * sum(
        program.num_microbatches_of(stage) for stage in range(program.num_stages)
    )
    if num_forwards <= schedule.num_ops:
        return []
    return [
        (f"{num_forwards} forwards are due, of {schedule.num_ops} ops in all", None)
    ]


def op_faults(schedule: Schedule) -> Iterator[Fault]:
    """Ops that are missing, doubled, foreign to the program, or on a wrong device."""
    program = schedule.program
    found = Counter(op for lane in schedule.lanes for op in lane.ops)
    yield from _placement_faults(schedule)
    due = dict.fromkeys(due_ops(program))
    for op, count in found.items():
        if count > 1:
            yield f"{op} is there {count} times", op
        if op.kind in MESSAGES:
            yield from _message_faults(op, found, program)
        elif _whole(op) not in due:
            yield f"{op} is no op of this program ({_sizes(program)})", op
    for op in due:
        if op.kind is Kind.BACKWARD:
            yield from _backward_faults(op, found)
        elif op not in found:
            yield f"{op} is missing", None


def _backward_faults(op: Op, found: Counter[Op]) -> Iterator[Fault]:
    """A backward must be there whole, or as both of its halves."""
    halves = [Op(kind, op.stage, op.microbatch, op.step) for kind in _HALVES]
    missing = [half for half in halves if half not in found]
    if op in found and len(missing) < len(halves):
        yield f"{op} is there whole and as {_HALF_NAMES}", op
    elif op not in found and len(missing) == len(halves):
        yield f"{op} is missing, and so are {_HALF_NAMES}", None
    elif len(missing) == 1:
        yield f"{missing[0]} is missing, the other half is there", None


_HALVES = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_HALF_NAMES = "its halves I and W"


def _whole(op: Op) -> Op:
    if op.kind in _HALVES:
        return Op(Kind.BACKWARD, op.stage, op.microbatch, op.step)
    return op


def _sizes(program: Program) -> str:
    microbatches = ", ".join(str(net.num_microbatches) for net in program.nets)
    return (
        f"{program.num_stages} stages, {microbatches} microbatches, "
        f"{program.num_steps} steps, {program.num_replicas} replicas"
    )


def _placement_faults(schedule: Schedule) -> Iterator[Fault]:
    seen = Counter((lane.device, lane.stream) for lane in schedule.lanes)
    for (device, stream), count in seen.items():
        if count > 1:
            yield f"device {device} has {count} lanes for stream {stream}", None
    for lane in schedule.lanes:
        for op in lane.ops:
            if op.stage >= schedule.program.num_stages:
                continue  # reported as no op of this program
            home = schedule.program.stages[op.stage].device
            if home != lane.device:
                yield f"{op} is on device {lane.device}, its stage on {home}", op


def _message_faults(op: Op, found: Counter[Op], program: Program) -> Iterator[Fault]:
    assert op.peer is not None
    other = Op(_OTHER_END[op.kind], op.peer, op.microbatch, op.step, op.stage)
    if other not in found:
        yield f"{op} has no {other} at the other end", op
    forward = op.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
    sends = op.kind in SENDS
    flow = (op.stage, op.peer) if forward == sends else (op.peer, op.stage)
    if flow not in program.flows:
        yield f"{op} goes along {flow[0]} -> {flow[1]}, which is no flow", op


_OTHER_END = {
    Kind.SEND_FORWARD: Kind.RECEIVE_FORWARD,
    Kind.RECEIVE_FORWARD: Kind.SEND_FORWARD,
    Kind.SEND_BACKWARD: Kind.RECEIVE_BACKWARD,
    Kind.RECEIVE_BACKWARD: Kind.SEND_BACKWARD,
}


def body_faults(schedule: Schedule) -> Iterator[Fault]:
    """Ops of a body that do not repeat what stands one repetition before them."""
    for lane, (begin, end) in zip(schedule.lanes, schedule.body, strict=False):
        length = (end - begin) // schedule.num_repeats
        for i in range(begin + length, end):
            before, op = lane.ops[i - length], lane.ops[i]
            wanted = Op(
                before.kind,
                before.stage,
                before.microbatch,
                before.step + 1,
                before.peer,
            )
            if op != wanted:
                yield f"{op} stands in the body where {wanted} would repeat it", op


def message_order_faults(schedule: Schedule) -> Iterator[Fault]:
    """Both ends of a pair of devices must post their messages in the same order."""
    posts: dict[tuple[int, int, bool], list[Op]] = {}
    stages = schedule.program.stages
    for lane in schedule.lanes:
        for op in lane.ops:
            if op.kind not in MESSAGES or op.peer is None:
                continue
            sends = op.kind in SENDS
            ends = (lane.device, stages[op.peer].device)
            key = (*(ends if sends else ends[::-1]), sends)
            posts.setdefault(key, []).append(op)
    for (source, target, sends), ops in posts.items():
        if not sends:
            continue
        others = posts.get((source, target, False), [])
        expected = [
            Op(_OTHER_END[op.kind], op.peer or 0, op.microbatch, op.step, op.stage)
            for op in ops
        ]
        if others == expected:
            continue
        i = next(
            i for i, (a, b) in enumerate(zip(others, expected, strict=True)) if a != b
        )
        yield (
            f"device {source} sends {ops[i]} as message {i} to device {target}, which "
            f"receives {others[i]} there: post them in the same order at both ends",
            ops[i],
        )
