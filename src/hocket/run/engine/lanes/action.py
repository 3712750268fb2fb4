"""What is done for one op: a flat list of instructions, made once and played often.

1B0    take the gradient of 2 │ backward │ release it │ put the gradient to 0 │ ...
       └ each instruction reads what those before it have left in `Playing`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hocket.run.data.step_batch import NetBatches
from hocket.run.engine.lanes.op_times import OpTimer


@dataclass(slots=True)
class Playing:
    """One op while it is played, and what its instructions hand on.

    Args:
        batch: the batch of each net.
        index: the op's microbatch, by its number in the schedule; 0 if it has none.
        timer: takes the op's time.
        received: what was taken.
        made: what was computed.
    """

    batch: NetBatches
    index: int
    timer: OpTimer
    received: Sequence[Any] = ()
    made: Any = ()


class Instruction(NamedTuple):
    """One thing that is done for an op.

    Args:
        text: what it is, in a word or a few.
        run: does it.
    """

    text: str
    run: Callable[[Playing], None]


class OpAction:
    """Plays one op.

    Args:
        instructions: what is done, in this order.
        index: the op's microbatch, by its number in the schedule; 0 if it has none.
    """

    def __init__(self, instructions: Iterable[Instruction], index: int = 0) -> None:
        self.instructions = tuple(instructions)
        self._runs = tuple(one.run for one in self.instructions)
        self._index = index

    def __str__(self) -> str:
        """Return what is done, on one line."""
        return " │ ".join(one.text for one in self.instructions)

    def play(self, batch: NetBatches, timer: OpTimer) -> None:
        """Play the op on a batch of each net."""
        playing = Playing(batch, self._index, timer)
        for run in self._runs:
            run(playing)
