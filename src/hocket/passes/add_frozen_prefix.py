"""Put a frozen part of the net before a stage, on the same device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hocket.core.op import Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.errors import PlanError
from hocket.passes.segments import rewritten


def add_frozen_prefix(schedule: Schedule, before: int = 0) -> Schedule:
    r"""Return the same order, with a frozen stage before one of its stages.

    It runs on the device of that stage, forward only, right before each of its
    forwards. That stage and those behind it have a number higher by 1.

    Args:
        schedule: an order of one net whose stages follow each other, without messages.
        before: the stage that it precedes; those before that one are frozen.

    Raises:
        PlanError: it has several nets, copies of stages, or several first stages.

    >>> lines = "d0  0F0 0F1 0B0 0B1 0U", "d1  1F0 1B0 1F1 1B1 1U"
    >>> for lane in add_frozen_prefix(Schedule.parse("\n".join(lines))).lanes:
    ...     print(lane.label, *lane.ops)
    d0 0F0 1F0 0F1 1F1 1B0 1B1 1U
    d1 2F0 2B0 2F1 2B1 2U
    """
    program = schedule.program
    if len(program.nets) > 1 or program.copies or any(program.sources[0]):
        raise PlanError(
            "a frozen part goes before an order of one net whose stages have no "
            f"copies; this one has {len(program.nets)} nets and "
            f"{len(program.copies)} groups of copies"
        )

    def with_prefix(ops: Sequence[Op]) -> Iterator[Op]:
        for op in ops:
            if op.stage == before and op.kind is Kind.FORWARD:
                yield op
            yield replace(op, stage=op.stage + (op.stage >= before))

    longer = rewritten(schedule, with_prefix)
    return replace(longer, program=_longer(program, before))


def _longer(program: Program, before: int) -> Program:
    stages = program.stages
    frozen = replace(stages[before], trainable=False, delay=0)
    flows = {(a + (a >= before), b + (b > before)) for a, b in program.flows}
    return replace(
        program,
        stages=(*stages[:before], frozen, *stages[before:]),
        flows=tuple(sorted({*flows, (before, before + 1)})),
    )
