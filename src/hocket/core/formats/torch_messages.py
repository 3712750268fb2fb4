"""Write the cells of PyTorch's CSV with their messages, in torch's order.

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

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from hocket.core.dataflow import Fact, Value, is_given, makes, needs
from hocket.core.op import Kind, Op
from hocket.core.program import Program
from hocket.errors import DeadlockError

# No op for a bubble, two for ops that torch starts together.
CsvCell: TypeAlias = tuple[Op, ...]

_ENDS_STAGE: Final = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})
_NEXT: Final = {Fact.OUTPUT: ("F", 1), Fact.INPUT_GRAD: ("B", -1)}


def cell_text(ops: CsvCell) -> str:
    """Write one cell of compute.

    >>> cell_text((Op.parse("2F3"), Op.parse("1B0"))), cell_text(())
    ('(2F3;1B0)OVERLAP_F_B', '')
    """
    texts = ";".join(map(str, ops))
    return f"({texts})OVERLAP_F_B" if len(ops) > 1 else texts


def rows_with_messages(
    rows: Sequence[Sequence[CsvCell]], program: Program
) -> list[list[str]]:
    """Write the cells of each device, with messages and reductions, without bubbles.

    Args:
        rows: the compute of each device.
        program: one chain of stages.

    Raises:
        DeadlockError: the devices wait for each other.
    """
    writer = _Writer(program, [deque(_with_reductions(row)) for row in rows])
    while any(writer.left):
        wrote = [writer.write_cell(device) for device in range(len(rows))]
        if not any(wrote):
            stuck = (
                f"  d{d} stands at {c[0].text}" for d, c in enumerate(writer.left) if c
            )
            raise DeadlockError(("no cell can begin, each waits for another:", *stuck))
    return writer.rows


class _Cell(NamedTuple):
    text: str
    ops: CsvCell


def _with_reductions(row: Sequence[CsvCell]) -> Iterator[_Cell]:
    """Yield cells, and REDUCE_GRAD after each stage's last backward."""
    last = {
        op.stage: i for i, ops in enumerate(row) for op in ops if op.kind in _ENDS_STAGE
    }
    for i, ops in enumerate(row):
        if ops:
            yield _Cell(cell_text(ops), ops)
        ended = (op.stage for op in ops if last.get(op.stage) == i)
        yield from (_Cell(f"{stage}REDUCE_GRAD", ()) for stage in dict.fromkeys(ended))


class _Writer:
    """Devices take turns, and each writes its next cell if it can begin."""

    def __init__(self, program: Program, left: list[deque[_Cell]]) -> None:
        self.program = program
        self.left = left
        self.rows: list[list[str]] = [[] for _ in left]
        self.have: list[set[Value]] = [set() for _ in left]

    def write_cell(self, device: int) -> bool:
        """Write a device's next cell; return whether there is one that can begin."""
        cells, program = self.left[device], self.program
        if not cells or not all(
            is_given(value) or value in self.have[device]
            for op in cells[0].ops
            for value in needs(op, program)
        ):
            return False
        cell = cells.popleft()
        self.rows[device].append(cell.text)
        for op in cell.ops:
            for value in makes(op, program):
                self.have[device].add(value)
                self._post(value, device)
        return True

    def _post(self, value: Value, device: int) -> None:
        """Write a send and a receive, if the next stage is on another device."""
        letter, distance = _NEXT.get(value.fact, ("", 0))
        reader = value.stage + distance
        if not distance or not 0 <= reader < self.program.num_stages:
            return
        other = self.program.stages[reader].device
        if other != device:
            self.rows[device].append(f"{value.stage}SEND_{letter}{value.microbatch}")
            self.rows[other].append(f"{reader}RECV_{letter}{value.microbatch}")
            self.have[other].add(value)
