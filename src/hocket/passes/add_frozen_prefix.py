"""Put a frozen part of the net before the pipeline, on its first device."""

from __future__ import annotations

from dataclasses import replace

from hocket.core.op import Kind, Op
from hocket.core.program import Program, Stage
from hocket.core.schedule import Schedule
from hocket.errors import PlanError
from hocket.passes.segments import rewritten


def add_frozen_prefix(schedule: Schedule) -> Schedule:
    r"""Return the same order, with a frozen stage before the first one.

    It runs on the device of the first stage, forward only, right before each forward of
    that stage. All other stages have a number higher by 1.

    Args:
        schedule: an order of one net whose stages follow each other, without messages.

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
    first = program.stages[0]

    def behind(op: Op) -> Op:
        return replace(op, stage=op.stage + 1)

    def with_prefix(ops: tuple[Op, ...]) -> list[Op]:
        found = []
        for op in ops:
            if op.stage == 0 and op.kind is Kind.FORWARD:
                found.append(op)
            found.append(behind(op))
        return found

    longer = rewritten(schedule, lambda ops: with_prefix(tuple(ops)))
    return replace(longer, program=_longer(program, first))


def _longer(program: Program, first: Stage) -> Program:
    frozen = Stage(first.net, first.device, trainable=False)
    flows = ((0, 1), *((a + 1, b + 1) for a, b in program.flows))
    return replace(program, stages=(frozen, *program.stages), flows=flows)
