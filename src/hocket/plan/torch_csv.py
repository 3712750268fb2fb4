"""PyTorch's compute-only CSV: one row per device, one op per cell, no updates.

    0F0,0F1,,0B0,0B1          a cell may be empty (a bubble, which has no place here)
    1F0,1B0,1F1,1B1,          updates and reductions are implied at the end
    (2F3;1B0)OVERLAP_F_B      two ops that torch starts together; here, one by one

Source: torch.distributed.pipelining, `_PipelineScheduleRuntime._load_csv`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from hocket.errors import ParseError, PlanError
from hocket.plan.infer import infer_program
from hocket.plan.op import BACKWARDS, Kind, Op
from hocket.plan.program import Program
from hocket.plan.schedule import Lane, Schedule
from hocket.plan.step_end import close_step

_COMPUTE: Final = BACKWARDS | {Kind.FORWARD, Kind.BACKWARD_WEIGHT}
_OVERLAPPED: Final = re.compile(r"\(([^();]+);([^();]+)\)OVERLAP_F_B")


def to_csv(schedule: Schedule) -> str:
    """Write the forwards and backwards of a one-step order.

    Raises:
        PlanError: the order has several steps, several lanes on a device, or a program
            that is more than one chain of stages with a loss per microbatch.
    """
    program = schedule.program
    if program.num_steps != 1:
        raise PlanError(
            f"PyTorch's CSV holds one step, this order has {program.num_steps}: make "
            "it with num_steps=1"
        )
    if not _is_plain_chain(program):
        raise PlanError(
            "PyTorch's CSV knows one net, its stages in a chain, a loss per microbatch "
            "and no delays; this program is more: keep it as text instead"
        )
    devices = [lane.device for lane in schedule.lanes]
    if devices != list(range(program.num_devices)):
        raise PlanError(
            "PyTorch's CSV holds one row per device, in order; this order has lanes "
            + ", ".join(lane.label for lane in schedule.lanes)
        )
    rows = (
        ",".join(str(op) for op in lane.ops if op.kind in _COMPUTE)
        for lane in schedule.lanes
    )
    return "".join(f"{row}\n" for row in rows)


def from_csv(text: str, *, path: str = "<csv>") -> Schedule:
    """Read rows of compute ops; `path` is named in errors.

    Raises:
        ParseError: with the path and the line.
    """
    rows = [
        tuple(_ops(line, f"{path}, line {number}"))
        for number, line in enumerate(text.rstrip().splitlines(), start=1)
    ]
    if not all(rows):
        number = 1 + rows.index(())
        raise ParseError(f"{path}, line {number}: device {number - 1} has no ops")
    if not rows:
        raise ParseError(f"{path}: no ops in the file; expected rows like 0F0,0F1,0B0")
    lanes = tuple(Lane(device, 0, ops) for device, ops in enumerate(rows))
    program = infer_program(lanes, path=path)
    closed = tuple(close_step(program, lane.device, lane.ops) for lane in lanes)
    return Schedule(program, closed)


def _is_plain_chain(program: Program) -> bool:
    first, *others = program.nets
    return (
        not others
        and not first.batch_loss
        and program.flows == tuple((s, s + 1) for s in range(program.num_stages - 1))
        and not any(stage.delay or stage.follows for stage in program.stages)
        and len({stage.trainable for stage in program.stages}) == 1
    )


def _ops(line: str, where: str) -> Iterator[Op]:
    for cell in line.split(","):
        both = _OVERLAPPED.fullmatch(cell.strip())
        for text in both.groups() if both else [cell.strip()]:
            if text:
                yield _op(text, where)


def _op(text: str, where: str) -> Op:
    try:
        op = Op.parse(text)
    except ParseError as error:
        raise ParseError(f"{where}: {error}") from None
    if op.kind not in _COMPUTE or op.step:
        raise ParseError(
            f"{where}: {text!r} is not a forward or backward of one step; a "
            "compute-only CSV holds F, B, I and W alone"
        )
    return op
