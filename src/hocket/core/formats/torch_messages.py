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

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from hocket.core.dataflow import Fact, is_sent, makes, needs
from hocket.core.op import Kind, Op
from hocket.core.plans.lane_plan import Message
from hocket.core.plans.message_order import Item, Receives, play_messages
from hocket.core.program import Program

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
    lanes = [[*_items(row, device, program)] for device, row in enumerate(rows)]
    written: list[list[str]] = [[] for _ in rows]
    for event in play_messages(lanes, Receives.AT_ONCE):
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


def _items(
    row: Sequence[CsvCell], device: int, program: Program
) -> Iterator[Item[str]]:
    """Yield cells, and REDUCE_GRAD after each stage's last backward."""
    last = {
        op.stage: i for i, ops in enumerate(row) for op in ops if op.kind in _ENDS_STAGE
    }
    for i, ops in enumerate(row):
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
