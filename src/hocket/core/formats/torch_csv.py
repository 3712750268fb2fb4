"""Write and read PyTorch's CSV: a row per device, an action per cell, one step.

    0F0,0F1,,0B0,0B1          "compute_only": an empty cell is a bubble; updates and
    1F0,1B0,1F1,1B1,          reductions are implied
    (2F3;1B0)OVERLAP_F_B      two ops that torch starts together

    0F0,0SEND_F0,0RECV_B0     "compute_comms": messages too, with one of their stages
    0UNSHARD,...,0REDUCE_GRAD and what torch does for sharded weights and at the end

Both forms are read, and give the same order: the runtime that plays it adds messages of
its own, starts ops one by one, and leaves waiting to the simulator. Where bubbles and
overlapped pairs stood is kept for the next file.

A schedule that holds messages is written with them, where torch posts them (see
`torch_messages`), and with its UNSHARD and RESHARD, which torch does not number. They
are kept when the file is read for sharded stages, and left out for whole ones.

Source: torch.distributed.pipelining, `_PipelineScheduleRuntime._load_csv`.

Write the cells of PyTorch's CSV with their messages, in torch's order.

A value is sent and received in the same moment, as soon as it is made:

    0F0  0SEND_F0                0F1  0SEND_F1  0RECV_B0  0B0
                  1RECV_F0  1F0  1B0            1SEND_B0       1RECV_F1  1F1  ...

So all devices post their messages in one order, and that they come to an end holds for
any kind of queue: even where all of a device's messages go through one (a single NCCL
communicator), and each waits for the one before. Receives that are posted earlier, as
`hocket.passes.add_messages` does, need a queue of their own.

Source: torch.distributed.pipelining.schedules, `_add_send_recv`, `_add_reduce_grad`.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from hocket.core.dataflow import Fact, is_sent, makes, needs
from hocket.core.formats.infer import infer_program
from hocket.core.op import BACKWARDS, MAKES_WEIGHT_GRAD, MESSAGES, SHARDING, Kind, Op
from hocket.core.plans.lane_plan import Message
from hocket.core.plans.message_order import Item, Receives, play_messages
from hocket.core.program import Program
from hocket.core.schedule import Lane, Schedule
from hocket.core.step_end import close_step
from hocket.errors import ParseError, PlanError, ScheduleError

_COMPUTE: Final = BACKWARDS | {Kind.FORWARD, Kind.BACKWARD_WEIGHT}
_OP: Final = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
_OVERLAPPED: Final = re.compile(r"\(([^();]+);([^();]+)\)OVERLAP_F_B")
_GATHER: Final = re.compile(r"(\d{1,9})(UNSHARD|RESHARD)", re.ASCII)
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

    With messages, the gathers of sharded stages, too: torch's form without them is of
    compute alone.

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
    cells = [_compute(lane) for lane in schedule.lanes]
    rows = (
        [[cell_text(ops) for ops in row] for row in cells]
        if schedule.kinds.isdisjoint(MESSAGES)
        else rows_with_messages(cells, program, schedule.lanes)
    )
    return "".join(f"{','.join(row)}\n" for row in rows)


def from_csv(
    text: str, *, path: str = "<csv>", num_replicas: int = 1, num_shards: int = 1
) -> Schedule:
    """Read rows of ops, and leave out messages, which the runtime adds itself.

    Args:
        text: the file's text, in either form.
        path: the name of the file in errors.
        num_replicas: replicas that reduce their gradients; the file does not hold them.
        num_shards: devices that hold a stage of a replica together. With several, the
            file's UNSHARD and RESHARD are kept, counted from 0; of a file without any,
            `hocket.passes.add_gathers` places them. With one they are left out.

    Raises:
        ParseError: a cell is no action, or the ops fit no program; names the path, the
            line and the cell.
        ScheduleError: an op is there twice, or without the op that belongs to it; names
            all of them, each with its place.
    """
    rows = [
        tuple(_cells(row, f"{path}, line {number}", has_shards=num_shards > 1))
        for number, row in enumerate(_rows(text, path), start=1)
    ]
    if not rows:
        raise ParseError(
            f"{path}, line 1: no ops in the file; expected rows like 0F0,0F1,0B0"
        )
    lanes = tuple(_lane(device, row, path) for device, row in enumerate(rows))
    program = replace(
        infer_program([(x.device, x.ops) for x in lanes], path=path),
        num_replicas=num_replicas,
        num_shards=num_shards,
    )
    faults = tuple(_faults([cell for row in rows for cell in row]))
    if faults:
        raise ScheduleError(faults)
    closed = tuple(
        replace(close_step(program, lane.device, lane.ops), csv_cells=lane.csv_cells)
        for lane in lanes
    )
    return Schedule(program, closed)


def _lane(device: int, row: Sequence[_Cell], path: str) -> Lane:
    ops = tuple(op for cell in row for op in cell.ops)
    if not ops:
        raise ParseError(f"{path}, line {device + 1}: device {device} has no ops")
    cells = (cell.ops for cell in row if not _is_gather(cell))
    return Lane(device, 0, ops, tuple(cells))


def _is_gather(cell: _Cell) -> bool:
    return any(op.kind in SHARDING for op in cell.ops)


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


def _compute(lane: Lane) -> tuple[CsvCell, ...]:
    """Return the compute of a lane as cells: those of its file, if they hold it."""
    ops = tuple(op for op in lane.ops if op.kind in _COMPUTE)
    kept = tuple(op for cell in lane.csv_cells for op in cell)
    return lane.csv_cells if kept == ops else tuple((op,) for op in ops)


@dataclass(frozen=True, slots=True)
class _Cell:
    """Ops that begin together, none for a bubble, and where they were read."""

    ops: CsvCell
    place: str


def _rows(text: str, path: str) -> Iterator[list[str]]:
    reader = csv.reader(io.StringIO(text.rstrip()))
    try:
        yield from reader
    except csv.Error as error:
        raise ParseError(f"{path}, line {reader.line_num}: {error}") from None


def _cells(row: Iterable[str], where: str, *, has_shards: bool) -> Iterator[_Cell]:
    counts: Counter[str] = Counter()
    for number, cell in enumerate(map(str.strip, row), start=1):
        place = f"{where}, cell {number}"
        gather = _GATHER.fullmatch(cell)
        if gather and has_shards:
            op = Op(Kind(gather[2]), int(gather[1]), counts[cell])
            counts[cell] += 1
            yield _Cell((op,), place)
        if _NO_OP.fullmatch(cell):
            continue
        both = _OVERLAPPED.fullmatch(cell)
        ops = []
        for text in both.groups() if both else (cell,) if cell else ():
            match = _OP.fullmatch(text.strip())
            if match is None:
                raise ParseError(f"{place}: {cell!r} is no action; {_EXPECTED}")
            ops.append(Op(Kind(match[2]), int(match[1]), int(match[3])))
        yield _Cell(tuple(ops), place)


def _faults(cells: Iterable[_Cell]) -> Iterator[str]:
    """Find doubled ops, and microbatches whose forward or backward is incomplete."""
    place: dict[Op, str] = {}
    work: dict[tuple[int, int | None], list[Op]] = defaultdict(list)
    for cell in cells:
        for op in () if _is_gather(cell) else cell.ops:
            if op in place:
                yield (
                    f"{cell.place}: {op} is there again, after {place[op]}; "
                    "expected each op once"
                )
            else:
                place[op] = cell.place
                work[op.stage, op.microbatch].append(op)
    trains = any(op.kind is not Kind.FORWARD for op in place)
    for (s, m), own in work.items():
        if trains and "".join(sorted(op.kind.value for op in own)) not in _WHOLE:
            there = " ".join(map(str, own))
            yield (
                f"{place[own[-1]]}: for microbatch {m}, stage {s} has {there}; "
                f"expected {s}F{m} {s}B{m}, or {s}F{m} {s}I{m} {s}W{m}"
            )


# No op for a bubble, two for ops that torch starts together.
CsvCell: TypeAlias = tuple[Op, ...]

_NEXT: Final = {Fact.OUTPUT: ("F", 1), Fact.INPUT_GRAD: ("B", -1)}


def cell_text(ops: CsvCell) -> str:
    """Write one cell of compute.

    >>> cell_text((Op.parse("2F3"), Op.parse("1B0"))), cell_text(())
    ('(2F3;1B0)OVERLAP_F_B', '')
    """
    texts = ";".join(map(str, ops))
    return f"({texts})OVERLAP_F_B" if len(ops) > 1 else texts


def rows_with_messages(
    rows: Sequence[Sequence[CsvCell]], program: Program, lanes: Sequence[Lane]
) -> list[list[str]]:
    """Write the cells of each device, with messages and reductions, without bubbles.

    Args:
        rows: the compute of each device.
        program: one chain of stages.
        lanes: say where the gathers of sharded stages stand.

    Raises:
        DeadlockError: the devices wait for each other.
    """
    items = [
        [*_items(row, lane, program)] for row, lane in zip(rows, lanes, strict=True)
    ]
    written: list[list[str]] = [[] for _ in rows]
    for event in play_messages(items, Receives.AT_ONCE):
        if isinstance(event, Item):
            written[event.device].append(event.what)
            continue
        for message in event:
            value, (_, reader) = message.value, message.flows[0]
            letter, _ = _NEXT[value.fact]
            cell = f"{value.stage}SEND_{letter}{value.microbatch}"
            written[message.from_device].append(cell)
            cell = f"{reader}RECV_{letter}{value.microbatch}"
            written[message.to_device].append(cell)
    return written


def _items(row: Sequence[CsvCell], lane: Lane, program: Program) -> Iterator[Item[str]]:
    """Yield cells, REDUCE_GRAD after each stage's last backward, and gathers."""
    device, (before, behind) = lane.device, _gathers(row, lane)
    last = {
        op.stage: i
        for i, ops in enumerate(row)
        for op in ops
        if op.kind in MAKES_WEIGHT_GRAD
    }
    for i, ops in enumerate(row):
        yield from (Item(text, device) for text in before[i])
        if ops:
            yield Item(
                cell_text(ops),
                device,
                tuple(value for op in ops for value in needs(op, program)),
                tuple(value for op in ops for value in makes(op, program)),
                tuple(_messages(ops, device, program)),
            )
        ended = (op.stage for op in ops if last.get(op.stage) == i)
        for stage in dict.fromkeys(ended):
            yield Item(f"{stage}REDUCE_GRAD", device)
        yield from (Item(text, device) for text in behind[i])


def _gathers(
    row: Sequence[CsvCell], lane: Lane
) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """Return the UNSHARD to write before each cell, and the RESHARD behind each."""
    place = {op: i for i, ops in enumerate(row) for op in ops}
    before: defaultdict[int, list[str]] = defaultdict(list)
    behind: defaultdict[int, list[str]] = defaultdict(list)
    waiting: list[str] = []
    last = 0
    for op in lane.ops:
        text = f"{op.stage}{op.kind.value}"
        if op.kind is Kind.UNSHARD:
            waiting.append(text)
        elif op.kind is Kind.RESHARD:
            behind[last].append(text)
        elif op in place:
            last = place[op]
            before[last] += waiting
            waiting = []
    return before, behind


def _messages(ops: CsvCell, device: int, program: Program) -> Iterator[Message]:
    """Yield what goes to the stage before or behind, if another device has it."""
    for op in ops:
        for value in makes(op, program):
            _, distance = _NEXT.get(value.fact, ("", 0))
            reader = value.stage + distance
            if not distance or not 0 <= reader < program.num_stages:
                continue
            other = program.stages[reader].device
            if is_sent(value, other, program):
                flows = ((value.stage, reader),)
                yield Message(value, device, device, other, flows)
