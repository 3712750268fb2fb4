"""Write and read PyTorch's CSV: a row per device, an action per cell, one step.

    0F0,0F1,,0B0,0B1          "compute_only": an empty cell is a bubble, which a
    1F0,1B0,1F1,1B1,          schedule leaves out; updates and reductions are added
    (2F3;1B0)OVERLAP_F_B      two ops that torch starts together; here, one by one

    0F0,0SEND_F0,0RECV_B0     "compute_comms": messages too, with one of their stages
    0UNSHARD,...,0REDUCE_GRAD and what torch does for sharded weights and at the end

Both forms are read, and give the same order: the runtime that plays it adds messages of
its own. A schedule that holds messages is written with them.

Source: torch.distributed.pipelining, `_PipelineScheduleRuntime._load_csv`.
"""

from __future__ import annotations

import csv
import io
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from hocket.core.formats.infer import infer_program
from hocket.core.op import BACKWARDS, MESSAGES, Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Lane, Schedule
from hocket.core.step_end import close_step
from hocket.errors import ParseError, PlanError, ScheduleError

_COMPUTE: Final = BACKWARDS | {Kind.FORWARD, Kind.BACKWARD_WEIGHT}
_ENDS_STAGE: Final = frozenset(
    {Kind.BACKWARD, Kind.BACKWARD_WEIGHT, Kind.SEND_BACKWARD}
)
_OP: Final = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
_OVERLAPPED: Final = re.compile(r"\(([^();]+);([^();]+)\)OVERLAP_F_B")
_NO_OP: Final = re.compile(  # what torch writes beside the compute
    r"\d{1,9}(?:(?:(?:WAIT_)?SEND_[FB]|RECV_[FB])\d{1,9}"
    r"|UNSHARD|RESHARD|(?:WAIT_)?REDUCE_GRAD)",
    re.ASCII,
)
_WHOLE: Final = ("BF", "FIW")  # what a stage does for a microbatch, as letters
_EXPECTED: Final = (
    "expected an op like 2F0, 2B0, 2I0 or 2W0, two of them as (2F3;1B0)OVERLAP_F_B, "
    "one of torch's messages like 2SEND_F0, or nothing; updates and reductions are "
    "implied"
)


def to_csv(schedule: Schedule) -> str:
    """Write the forwards and backwards of a one-step order, and the messages it holds.

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
    kinds = {op.kind for lane in schedule.lanes for op in lane.ops}
    cells = _compute_only if kinds.isdisjoint(MESSAGES) else _with_messages
    return "".join(f"{','.join(cells(lane))}\n" for lane in schedule.lanes)


def from_csv(text: str, *, path: str = "<csv>", num_replicas: int = 1) -> Schedule:
    """Read rows of ops, and leave out messages, which the runtime adds itself.

    Args:
        text: the file's text, in either form.
        path: the name of the file in errors.
        num_replicas: replicas that reduce their gradients; the file does not hold them.

    Raises:
        ParseError: a cell is no action, or the ops fit no program; names the path, the
            line and the cell.
        ScheduleError: an op is there twice, or without the op that belongs to it; names
            all of them, each with its place.
    """
    rows = [
        tuple(_cells(row, f"{path}, line {number}"))
        for number, row in enumerate(_rows(text, path), start=1)
    ]
    if not rows:
        raise ParseError(f"{path}: no ops in the file; expected rows like 0F0,0F1,0B0")
    if not all(rows):
        number = 1 + rows.index(())
        raise ParseError(f"{path}, line {number}: device {number - 1} has no ops")
    lanes = tuple(
        Lane(device, 0, tuple(cell.op for cell in row))
        for device, row in enumerate(rows)
    )
    program = replace(infer_program(lanes, path=path), num_replicas=num_replicas)
    faults = tuple(_faults([cell for row in rows for cell in row]))
    if faults:
        raise ScheduleError(faults)
    closed = tuple(close_step(program, lane.device, lane.ops) for lane in lanes)
    return Schedule(program, closed)


def _is_plain_chain(program: Program) -> bool:
    first, *others = program.nets
    return (
        not others
        and not program.copies
        and not first.batch_loss
        and program.flows == tuple((s, s + 1) for s in range(program.num_stages - 1))
        and not any(stage.delay or stage.follows for stage in program.stages)
        and len({stage.trainable for stage in program.stages}) == 1
    )


def _compute_only(lane: Lane) -> Iterator[str]:
    return (str(op) for op in lane.ops if op.kind in _COMPUTE)


def _with_messages(lane: Lane) -> Iterator[str]:
    """Write cells with messages, and REDUCE_GRAD after each stage's last action."""
    last = {op.stage: i for i, op in enumerate(lane.ops) if op.kind in _ENDS_STAGE}
    for i, op in enumerate(lane.ops):
        if op.kind in _COMPUTE | MESSAGES:
            yield f"{op.stage}{op.kind.value}{op.microbatch}"
        if last.get(op.stage) == i:
            yield f"{op.stage}REDUCE_GRAD"


@dataclass(frozen=True, slots=True)
class _Cell:
    """An op, and where it was read."""

    op: Op
    place: str


def _rows(text: str, path: str) -> Iterator[list[str]]:
    reader = csv.reader(io.StringIO(text.rstrip()))
    try:
        yield from reader
    except csv.Error as error:
        raise ParseError(f"{path}, line {reader.line_num}: {error}") from None


def _cells(row: Iterable[str], where: str) -> Iterator[_Cell]:
    for number, cell in enumerate(map(str.strip, row), start=1):
        place = f"{where}, cell {number}"
        if not cell or _NO_OP.fullmatch(cell):
            continue
        both = _OVERLAPPED.fullmatch(cell)
        for text in both.groups() if both else (cell,):
            match = _OP.fullmatch(text.strip())
            if match is None:
                raise ParseError(f"{place}: {cell!r} is no action; {_EXPECTED}")
            yield _Cell(Op(Kind(match[2]), int(match[1]), int(match[3])), place)


def _faults(cells: list[_Cell]) -> Iterator[str]:
    """Find doubled ops, and microbatches whose forward or backward is incomplete."""
    first: dict[Op, _Cell] = {}
    work: dict[tuple[int, int | None], list[_Cell]] = defaultdict(list)
    for cell in cells:
        earlier = first.setdefault(cell.op, cell)
        if earlier is cell:
            work[cell.op.stage, cell.op.microbatch].append(cell)
        else:
            yield (
                f"{cell.place}: {cell.op} is there again, after {earlier.place}; "
                "expected each op once"
            )
    trains = any(op.kind is not Kind.FORWARD for op in first)
    for (s, m), own in work.items():
        if trains and "".join(sorted(cell.op.kind.value for cell in own)) not in _WHOLE:
            there = " ".join(str(cell.op) for cell in own)
            yield (
                f"{own[-1].place}: for microbatch {m}, stage {s} has {there}; "
                f"expected {s}F{m} {s}B{m}, or {s}F{m} {s}I{m} {s}W{m}"
            )
