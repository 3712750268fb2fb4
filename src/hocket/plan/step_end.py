"""Close each step of a synchronous order: reductions and updates.

Schedules write down forwards and backwards; what must follow them is always the same:

    d0  ... 0B2 0B3 0R 2B3 2R 0U 2U
                     │         └─ the updates, when all of the device's work is done
                     └─ each stage's reduction as soon as its gradients are complete,
                        so that it overlaps with what is left to compute
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hocket.plan.op import Kind, Op
from hocket.plan.program import Program
from hocket.plan.schedule import Lane

_MAKES_WEIGHT_GRAD = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})


def close_step(
    program: Program, device: int, ops: Iterable[Op], *, stream: int = 0
) -> Lane:
    """One device's work of one step, with R and U added where the program wants them.

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
        if program.num_replicas > 1 and last.get(op.stage) == i:
            yield Op(Kind.REDUCE, op.stage, None, step)
    moving = [s for s in program.stages_on[device] if program.stages[s].moves]
    for stage in sorted(moving, key=lambda s: last.get(s, -1)):
        yield Op(Kind.UPDATE, stage, None, step)
