"""Put all work of a program into one lane, each weight gradient behind its input's."""

from __future__ import annotations

from hocket.core.op import Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Lane, Schedule


def serial(program: Program) -> Schedule:
    """Return the order of eager mode, of one step with one microbatch on one device.

    Each update stands behind its gradient, which is freed at once.

    >>> from hocket.core.program import Program
    >>> print(serial(Program.chain([0, 0], 1)))
    d0  0F0 1F0 1I0 1W0 1U 0I0 0W0 0U
    """
    stages = range(program.num_stages)
    ops = [Op(Kind.FORWARD, stage, 0) for stage in stages]
    for stage in reversed(stages):
        ops.append(Op(Kind.BACKWARD_INPUT, stage, 0))
        ops += gradient_and_update(stage)
    return Schedule(program, (Lane(0, 0, tuple(ops)),))


def gradient_and_update(stage: int) -> tuple[Op, Op]:
    """Return W and U of a stage."""
    return Op(Kind.BACKWARD_WEIGHT, stage, 0), Op(Kind.UPDATE, stage)
