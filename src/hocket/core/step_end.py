"""Close each step of a synchronous order, and repeat it.

Schedules write down forwards and backwards; what must follow them is always the same:

    d0  ... 2B3 2R 0B2 0B3 0R 2U 0U
                 │          │   └─ the updates, when all of the device's work is done
                 └──────────┴─ each stage's reduction as soon as its gradients are
                               complete, to overlap with what is left to compute

Some ops of a step may work for a later batch, such as a teacher's forwards:

    one step      d0  S S t@1 B B U           t@1 is for the batch of the next step

    prologue      d0  t                       the same for those batches that exist
    body              S S t@1 B B U
    epilogue          S@1 S@1 B@1 B@1 U@1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from hocket.core.op import MAKES_WEIGHT_GRAD, Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Lane, Schedule


def repeat_step(program: Program, order: Callable[[int], Iterable[Op]]) -> Schedule:
    """Make a synchronous schedule: every step is one order, closed by R and U.

    Args:
        program: with as many steps as the order is to be repeated.
        order: the compute of step 0 on a device.
    """
    lanes = tuple(
        close_step(program, device, order(device))
        for device in range(program.num_devices)
    )
    one_step = Schedule(replace(program, num_steps=1), lanes)
    return one_step.with_num_steps(program.num_steps)


def close_step(program: Program, device: int, ops: Iterable[Op]) -> Lane:
    """Add R and U to one device's work of one step, where the program wants them.

    Args:
        program: says which stages reduce and update.
        device: whose lane it is.
        ops: the compute of one step, in order.
    """
    return Lane(device, 0, tuple(_closed(program, device, tuple(ops))))


def _closed(program: Program, device: int, ops: tuple[Op, ...]) -> Iterator[Op]:
    last: dict[int, int] = {}
    for i, op in enumerate(ops):
        is_released = op.kind is Kind.RESHARD and last.get(op.stage) == i - 1
        if op.kind in MAKES_WEIGHT_GRAD or is_released:
            last[op.stage] = i
    step = ops[0].step if ops else 0
    reduced = program.reduced_stages
    for i, op in enumerate(ops):
        yield op
        if op.stage in reduced and last.get(op.stage) == i:
            yield Op(Kind.REDUCE, op.stage, None, step)
    moving = [s for s in program.stages_on[device] if program.stages[s].moves]
    # A stage that follows others is updated after them, whose new weights it reads.
    for stage in sorted(moving, key=lambda s: last.get(s, len(ops))):
        yield Op(Kind.UPDATE, stage, None, step)


def repeat_ahead(program: Program, lanes: Sequence[Lane]) -> Schedule:
    """Return the order of all steps, with a body unless there are too few of them.

    An order of which nothing is ahead has a body where stages read old weights.

    Args:
        program: with as many steps as the order is to have.
        lanes: the order of one step, whose number is 0. The step of an op says how many
            batches it is ahead.
    """
    num_ahead = max((op.step for lane in lanes for op in lane.ops), default=0)
    if not num_ahead and not any(stage.delay for stage in program.stages):
        one_step = Schedule(replace(program, num_steps=1), tuple(lanes))
        return one_step.with_num_steps(program.num_steps)
    num_repeats = max(0, program.num_steps - num_ahead)
    repeated, body = [], []
    for lane in lanes:
        begin = sum(op.step for op in lane.ops)  # once for each step that is ahead
        ops = tuple(
            op.later(step)
            for step in range(-num_ahead, program.num_steps)
            for op in lane.ops
            if 0 <= op.step + step < program.num_steps
        )
        repeated.append(Lane(lane.device, lane.stream, ops))
        body.append((begin, begin + num_repeats * len(lane.ops)))
    if not num_repeats:
        return Schedule(program, tuple(repeated))
    return Schedule(program, tuple(repeated), tuple(body), num_repeats)
