"""Close each step of a synchronous order: add its reductions and updates.

Schedules write down forwards and backwards; what must follow them is always the same:

    d0  ... 2B3 2R 0B2 0B3 0R 2U 0U
                 │          │   └─ the updates, when all of the device's work is done
                 └──────────┴─ each stage's reduction as soon as its gradients are
                               complete, to overlap with what is left to compute
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from hocket.core.op import Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Lane, Schedule

_MAKES_WEIGHT_GRAD = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})


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


def close_step(
    program: Program, device: int, ops: Iterable[Op], *, stream: int = 0
) -> Lane:
    """Add R and U to one device's work of one step, where the program wants them.

    Args:
        program: says which stages reduce and update.
        device: whose lane it is.
        ops: the compute of one step, in order.
        stream: the lane's stream.
    """
    return Lane(device, stream, tuple(_closed(program, device, tuple(ops))))


def _closed(program: Program, device: int, ops: tuple[Op, ...]) -> Iterator[Op]:
    last = {op.stage: i for i, op in enumerate(ops) if op.kind in _MAKES_WEIGHT_GRAD}
    step = ops[0].step if ops else 0
    for i, op in enumerate(ops):
        yield op
        if op.stage in program.reduced_stages and last.get(op.stage) == i:
            yield Op(Kind.REDUCE, op.stage, None, step)
    moving = [s for s in program.stages_on[device] if program.stages[s].moves]
    # A stage that follows others is updated after them, whose new weights it reads.
    for stage in sorted(moving, key=lambda s: last.get(s, len(ops))):
        yield Op(Kind.UPDATE, stage, None, step)
