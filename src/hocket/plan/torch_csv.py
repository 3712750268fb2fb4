"""PyTorch's compute-only CSV: one row per device, one op per cell, no updates.

    0F0,0F1,,0B0,0B1          a cell may be empty (a bubble, which has no place here)
    1F0,1B0,1F1,1B1,          updates and reductions are implied at the end

Source: torch.distributed.pipelining, `_PipelineScheduleRuntime._load_csv`.
"""

from __future__ import annotations

from hocket.errors import ParseError, PlanError
from hocket.plan.infer import infer_program
from hocket.plan.op import BACKWARDS, Kind, Op
from hocket.plan.schedule import Lane, Schedule
from hocket.plan.step_end import close_step

_COMPUTE = BACKWARDS | {Kind.FORWARD, Kind.BACKWARD_WEIGHT}


def to_csv(schedule: Schedule) -> str:
    """Write the forwards and backwards of a one-step order.

    Raises:
        PlanError: the order has several steps, or several lanes on a device.
    """
    if schedule.program.num_steps != 1:
        raise PlanError(
            f"PyTorch's CSV holds one step, this order has "
            f"{schedule.program.num_steps}: make it with num_steps=1"
        )
    devices = [lane.device for lane in schedule.lanes]
    if devices != list(range(len(devices))):
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
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{path}, line {number}"
        rows.append(tuple(_cell(cell.strip(), where) for cell in line.split(",") if cell.strip()))
    if not any(rows):
        raise ParseError(f"{path}: no ops in the file; expected rows like 0F0,0F1,0B0")
    lanes = tuple(Lane(device, 0, ops) for device, ops in enumerate(rows))
    program = infer_program(lanes, path=path)
    closed = tuple(close_step(program, lane.device, lane.ops) for lane in lanes)
    return Schedule(program, closed)


def _cell(text: str, where: str) -> Op:
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
