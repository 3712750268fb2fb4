"""Make orders in which no step waits for the one before to end.

A device goes through its stages in visits of a block of microbatches each, the next
step's behind the last one's, and alternates forwards and backwards from its warm-up on:

    forwards    s0 s0 s0  s1 s1 s1  s0 s0 s0 ...         visits, one block of 3
    backwards   . warm-up .  s1 s1 s1  s0 s0 s0  s1 ...

    prologue    │ body, once per step                │ epilogue
    F F ... F   │ F B  F B  F B U  F B  F B  F B U   │ B ... B U

Backwards go through a group of stages like a wave. An update that has to know all
gradients of its group cannot come before the wave's end, nor need it come before:

    device 2    ... B │ F B  F B  U        each device goes on with the next step until
    device 1    ...   F B │  F B  U        then, its first gradients beside those that
    device 0    ...     F B  F B │U        wait
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from hocket.core.dataflow import version_read
from hocket.core.op import Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Lane, Schedule
from hocket.schedules.entry import Shape
from hocket.schedules.one_f_one_b import alternate


def flush_free(
    shape: Shape,
    delays: Sequence[int],
    num_warmup: Callable[[int], int],
    *,
    num_blocks: int = 1,
    late_updates: bool = False,
) -> Schedule:
    """Return the order of visits, with updates where gradients are complete.

    With replicas, a reduction begins there, and the update waits until the new weights
    are wanted, or the next step's gradients come: other stages' work lies between.

    Args:
        shape: the shape; its stages go round and round the devices.
        delays: the delay of each stage.
        num_warmup: returns the forwards of a device before its first backward.
        num_blocks: the blocks of a step (see `block_sizes`); a visit is of one block.
        late_updates: whether each update comes as many backwards later as the first
            device is later with its own; with replicas, as late as the new weights are
            wanted. A delayed stage meanwhile has the gradients of two steps.
    """
    program = shape.chain(delays=delays)
    visits = _Visits(block_sizes(shape.num_microbatches, num_blocks), num_warmup)
    if not any(delays):  # each step ends before the next begins
        return Schedule(program, _lanes(program, visits))
    known = _repeating(program, visits, late=late_updates)
    least = known.program.num_steps - known.num_repeats + 1
    if shape.num_steps < least:  # prologue and epilogue leave no room for a body
        return Schedule(program, _lanes(program, visits, late=late_updates))
    return known.with_num_steps(shape.num_steps)


def block_sizes(num_microbatches: int, num_blocks: int) -> tuple[int, ...]:
    """Return the sizes of blocks: as equal as can be, the greater ones first.

    >>> block_sizes(11, 3)
    (4, 4, 3)
    """
    size, num_greater = divmod(num_microbatches, num_blocks)
    return (size + 1,) * num_greater + (size,) * (num_blocks - num_greater)


@dataclass(frozen=True, slots=True)
class _Visits:
    """How a device goes through its stages.

    Args:
        sizes: the microbatches of each block of a step.
        num_warmup: returns the forwards of a device before its first backward.
    """

    sizes: tuple[int, ...]
    num_warmup: Callable[[int], int]

    def ops(self, program: Program, device: int) -> Iterator[Op]:
        """Yield forwards from the first stage to the last, and backwards in reverse."""
        stages = program.stages_on[device]
        ends = list(accumulate(self.sizes))

        def visits(kind: Kind, order: Sequence[int]) -> list[Op]:
            return [
                Op(kind, stage, microbatch, step)
                for step in range(program.num_steps)
                for size, end in zip(self.sizes, ends, strict=True)
                for stage in order
                for microbatch in range(end - size, end)
            ]

        return alternate(
            visits(Kind.FORWARD, stages),
            visits(Kind.BACKWARD, stages[::-1]),
            num_warmup=self.num_warmup(device),
        )


def _repeating(program: Program, visits: _Visits, *, late: bool) -> Schedule:
    """Return the order of as many steps as it takes to see a body repeat."""
    num_forwards = sum(
        program.num_microbatches_of(stage) for stage in program.stages_on[0]
    )
    most = max(visits.num_warmup(device) for device in range(program.num_devices))
    num_filled = -(-most // num_forwards)  # steps that the warm-up reaches into
    # An update may stand among the next step's ops, or even the one's after it.
    num_late = bool(program.reduced_stages) + late
    some = replace(program, num_steps=num_filled + 2 + num_late)
    lanes = _lanes(some, visits, late=late)
    bodies = []
    for lane in lanes:
        begin = _begin(lane.ops)
        bodies.append((begin, begin + 2 * _length(lane.ops)))
    return Schedule(some, lanes, tuple(bodies), 2)


def _lanes(
    program: Program, visits: _Visits, *, late: bool = False
) -> tuple[Lane, ...]:
    lanes = []
    for device in range(program.num_devices):
        wave = visits.num_warmup(0) - visits.num_warmup(device)
        ops = _with_updates(program, visits.ops(program, device), wave, late=late)
        lanes.append(Lane(device, 0, tuple(ops)))
    return tuple(lanes)


def _with_updates(
    program: Program, ops: Iterable[Op], wave: int, *, late: bool
) -> Iterator[Op]:
    """Add R where a step's gradients are complete, and U there or later.

    Args:
        program: the program.
        ops: a device's ops, in order.
        wave: the backwards from this device's last of a step to the first device's.
        late: whether updates come as late as possible (see `flush_free`).
    """
    waiting: dict[Op, float] = {}  # for how many backwards
    for op in ops:
        if waiting:
            wanted = [u for u in waiting if _needs(op, u, program, late=late)]
            yield from _taken(waiting, wanted)
        yield op
        if op.kind is not Kind.BACKWARD:
            continue
        for update in waiting:
            waiting[update] -= 1
        if op.microbatch == program.num_microbatches_of(op.stage) - 1:
            update = Op(Kind.UPDATE, op.stage, None, op.step)
            waiting[update] = wave if late else 0
            if op.stage in program.reduced_stages:
                yield Op(Kind.REDUCE, op.stage, None, op.step)
                waiting[update] = math.inf
        yield from _taken(waiting, [u for u, left in waiting.items() if left <= 0])
    yield from waiting


def _taken(waiting: dict[Op, float], updates: Sequence[Op]) -> Sequence[Op]:
    for update in updates:
        del waiting[update]
    return updates


def _needs(op: Op, update: Op, program: Program, *, late: bool) -> bool:
    """Return whether an op must come after an update.

    The op reads the new weights, or adds to the gradients that the update reads. Late
    updates come before the next step's gradients are complete.
    """
    if op.stage != update.stage:
        return False
    if op.kind is Kind.FORWARD:
        return version_read(op.stage, op.step, program) > update.step
    is_last = op.microbatch == program.num_microbatches_of(op.stage) - 1
    return op.step > update.step and (is_last or not late)


def _begin(ops: Sequence[Op]) -> int:
    """Return where a step's work is followed by the next step's, op for op."""
    length = _length(ops)
    return next(
        begin
        for begin in range(len(ops))
        if all(
            ops[i + length] == replace(ops[i], step=ops[i].step + 1)
            for i in range(begin, begin + length)
        )
    )


def _length(ops: Sequence[Op]) -> int:
    """Return the number of a step's ops."""
    return sum(op.step == 0 for op in ops)
