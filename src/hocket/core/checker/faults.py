"""Find missing, doubled and misplaced ops, and broken pairs of ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from hocket.core.dataflow import due_ops, most_gathers, once_per_step
from hocket.core.op import (
    BACKWARDS,
    MESSAGES,
    ONCE_PER_STEP,
    RECEIVES,
    SENDS,
    SHARDING,
    SPLIT_BACKWARD,
    Kind,
    Op,
)
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.core.simulator.columns import NONE, Columns, ValueNumbers
from hocket.core.timelines.arrays import Ints

Fault = tuple[str, Op | None]


def too_much_due(schedule: Schedule) -> list[Fault]:
    """Refuse a program with more forwards than the schedule has ops."""
    program = schedule.program
    num_forwards = program.num_steps * sum(
        program.num_microbatches_of(stage) for stage in range(program.num_stages)
    )
    if num_forwards <= schedule.num_ops:
        return []
    text = (
        f"{num_forwards} forwards, but the schedule holds only {schedule.num_ops} ops"
    )
    return [(f"the program has {text}", None)]


def op_faults(schedule: Schedule) -> list[Fault]:
    """Find ops that are missing, doubled, foreign to the program, or misplaced."""
    return [] if is_complete(schedule) else list(each_op_fault(schedule))


def each_op_fault(schedule: Schedule) -> Iterator[Fault]:
    """Look at every op by itself, which takes long where all is well."""
    program = schedule.program
    found = Counter(op for lane in schedule.lanes for op in lane.ops)
    yield from _placement_faults(schedule)
    due = dict.fromkeys(due_ops(program))
    for op, count in found.items():
        if count > 1:
            yield f"{op} is there {count} times", op
        whole = op.as_kind(Kind.BACKWARD) if op.kind in SPLIT_BACKWARD else op
        if op.kind in MESSAGES:
            yield from _message_faults(op, found, program)
        elif not (_is_gather(op, program) or whole in due):
            yield f"{op} is no op of this program ({_sizes(program)})", op
    for op in due:
        if op.kind is Kind.BACKWARD:
            yield from _backward_faults(op, found)
        elif op not in found:
            yield f"{op} is missing", None


def _backward_faults(op: Op, found: Counter[Op]) -> Iterator[Fault]:
    """Check that a backward is there as B, or as both I and W."""
    first, second = (op.as_kind(kind) for kind in SPLIT_BACKWARD)
    num_there = (first in found) + (second in found)
    if op in found and num_there:
        yield f"{op} is there, and so is {first if first in found else second}", op
    elif op not in found and not num_there:
        yield f"{op} is missing, and so are {first} and {second}", None
    elif num_there == 1:
        there, missing = (first, second) if first in found else (second, first)
        yield f"{missing} is missing, but {there} is there", None


def _is_gather(op: Op, program: Program) -> bool:
    """Return whether it is an UNSHARD or RESHARD that the program may have.

    Without shards it may have none, which `gather_faults` says.
    """
    if op.kind not in SHARDING or program.num_shards == 1:
        return op.kind in SHARDING
    return (
        op.stage < program.num_stages
        and 0 <= op.step < program.num_steps
        and 0 <= (op.microbatch or 0) < most_gathers(op.stage, program)
    )


def _sizes(program: Program) -> str:
    microbatches = ", ".join(str(net.num_microbatches) for net in program.nets)
    return (
        f"{program.num_stages} stages, {microbatches} microbatches, "
        f"{program.num_steps} steps, {program.num_replicas} replicas"
        f"{f' of {program.num_shards} shards' * (program.num_shards > 1)}"
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
    if op.peer is None:
        yield f"{op} does not name the stage at the other end", op
        return
    other = _other_end(op)
    if other not in found:
        yield f"{op} has no {other} at the other end", op
    is_forward = op.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
    flow = op.stage, other.stage
    if is_forward != (op.kind in SENDS):
        flow = flow[::-1]
    if flow not in program.flows:
        yield f"{op} goes along {flow[0]} -> {flow[1]}, which is no flow", op


def _other_end(op: Op) -> Op:
    """Return the receive of a send, or the send of a receive."""
    assert op.peer is not None
    return Op(_OTHER_END[op.kind], op.peer, op.microbatch, op.step, op.stage)


_OTHER_END = {
    Kind.SEND_FORWARD: Kind.RECEIVE_FORWARD,
    Kind.RECEIVE_FORWARD: Kind.SEND_FORWARD,
    Kind.SEND_BACKWARD: Kind.RECEIVE_BACKWARD,
    Kind.RECEIVE_BACKWARD: Kind.SEND_BACKWARD,
}


def body_faults(schedule: Schedule) -> Iterator[Fault]:
    """Find ops of a body that do not repeat those one repetition before them."""
    for lane, (begin, end) in zip(schedule.lanes, schedule.body, strict=False):
        length = (end - begin) // schedule.num_repeats
        repeated, later = lane.ops[begin : end - length], lane.ops[begin + length : end]
        for before, op in zip(repeated, later, strict=True):
            if not _repeats(op, before):
                wanted = replace(before, step=before.step + 1)
                yield f"{op} stands in the body where {wanted} would repeat it", op


def _repeats(op: Op, before: Op) -> bool:
    """Return whether an op is another one, one step later."""
    return (
        op.step == before.step + 1
        and op.microbatch == before.microbatch
        and op.stage == before.stage
        and op.kind is before.kind
        and op.peer == before.peer
    )


def message_order_faults(schedule: Schedule) -> Iterator[Fault]:
    """Check that both ends of a channel post their messages in the same order."""
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
        expected = [_other_end(op) for op in ops]
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


# Decide for all ops at once whether a schedule has the right ones, each once.
#
# Each microbatch of each stage and step has a number, by which ops are found.
#
# `faults` names what is wrong, op by op.

_FORWARD_MESSAGES = frozenset({Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD})


def is_complete(schedule: Schedule) -> bool:
    """Return whether a schedule has all ops of its program, each once, and no others.

    Args:
        schedule: any schedule; nothing about it is assumed.
    """
    streams = [(lane.device, lane.stream) for lane in schedule.lanes]
    try:
        columns = Columns.read(schedule)
    except OverflowError:  # a number that is too large for any program
        return False
    program = schedule.program
    return (
        len(set(streams)) == len(streams)
        and _are_of_program(columns, program)
        and _are_due(columns, program)
        and _have_two_ends(columns, program)
    )


def _are_of_program(columns: Columns, program: Program) -> bool:
    """Return whether the program has the numbers of all ops, on their devices."""
    home = np.array([stage.device for stage in program.stages])
    num_stages, num_microbatches = program.num_stages, _num_microbatches(program)
    num_gathers = np.array([most_gathers(s, program) for s in range(num_stages)])
    stage = np.clip(columns.stage, 0, num_stages - 1)
    peer = np.clip(columns.peer, 0, num_stages - 1)
    owner = np.where(columns.is_any(RECEIVES), peer, stage)
    expected = (
        columns.stage == stage,
        columns.peer == np.where(columns.is_any(MESSAGES), peer, NONE),
        columns.device == home[stage],
        (columns.step >= 0) & (columns.step < program.num_steps),
        (columns.microbatch == NONE) == columns.is_any(ONCE_PER_STEP),
        (columns.microbatch >= 0) | columns.is_any(ONCE_PER_STEP),
        columns.microbatch
        < np.where(
            columns.is_any(SHARDING), num_gathers[owner], num_microbatches[owner]
        ),
    )
    return all(bool(each.all()) for each in expected)


def _are_due(columns: Columns, program: Program) -> bool:
    """Return whether the compute, the reductions and the updates are those wanted."""
    numbers = ValueNumbers.of(program)
    key = numbers.number(
        0 * columns.kind,
        columns.stage,
        columns.step,
        np.maximum(0, columns.microbatch),
    )

    def found(*kinds: Kind) -> Ints:
        return np.sort(key[columns.is_any(frozenset(kinds))])

    def due(stages: Iterable[int], counts: Sequence[int]) -> Ints:
        steps, zero = np.arange(program.num_steps)[:, None], np.zeros(1, np.int64)
        each = (
            numbers.number(zero, zero + stage, steps, np.arange(counts[stage]))
            for stage in stages
        )
        return np.concatenate([zero[:0], *(of_one.ravel() for of_one in each)])

    stages = range(program.num_stages)
    counts, once = _num_microbatches(program).tolist(), [1] * program.num_stages
    trained = [stage for stage in stages if program.stages[stage].trainable]
    own = [{*once_per_step(stage, program)} for stage in stages]
    pairs = (
        (found(Kind.FORWARD), due(stages, counts)),
        (found(*BACKWARDS), due(trained, counts)),
        (found(Kind.BACKWARD_WEIGHT), found(Kind.BACKWARD_INPUT)),
        *(
            (found(kind), due((s for s in stages if kind in own[s]), once))
            for kind in ONCE_PER_STEP
        ),
    )
    return all(np.array_equal(*pair) for pair in pairs)


def _have_two_ends(columns: Columns, program: Program) -> bool:
    """Return whether each SEND has its RECV, each is there once, along a flow."""
    is_message = columns.is_any(MESSAGES)
    if not is_message.any():
        return True
    is_send, is_forward = columns.is_any(SENDS), columns.is_any(_FORWARD_MESSAGES)
    ends = columns.stage, columns.peer
    source, target = np.where(is_send == is_forward, ends, ends[::-1])
    flow = source * program.num_stages + target
    flows = np.array([a * program.num_stages + b for a, b in program.flows], np.int64)
    most = int(_num_microbatches(program).max())
    key = (flow * 2 + is_forward) * program.num_steps + columns.step
    key = key * most + columns.microbatch
    sent, received = (np.sort(key[ops]) for ops in (is_send, is_message & ~is_send))
    return (
        bool(np.isin(flow[is_message], flows).all())
        and bool((np.diff(sent) > 0).all())
        and np.array_equal(sent, received)
    )


def _num_microbatches(program: Program) -> Ints:
    stages = range(program.num_stages)
    return np.array([program.num_microbatches_of(stage) for stage in stages])
