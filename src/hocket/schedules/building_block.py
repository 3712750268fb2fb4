"""Repeat one microbatch's pattern every six slots, and squeeze what comes out.

On a V each device does six ops per microbatch: F, I and W of the stage on the way down
and of that on the way up. A *block* says in which slot of one op's length each of them
stands. Moved on by six slots from microbatch to microbatch, no two ops meet, if no two
of a block's slots are alike modulo six:

    slot      0  1  2  3  4  5  6  7  8  9 10 11 12 ...
    0, and    0F .  .  3F 3I 3W .  0I 0W                     block of device 0, p = 2
    1               .     .     0F .  .  3F 3I 3W .          ... of the next microbatch

The number of microbatches on a stage at once is how long one stays, in periods of six
slots. So the block decides how much memory an order takes, and squeezing keeps to that:
in each slot a device does the first op of its blocks that is ready and has room; and a
weight gradient if there is no other.

Source: Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv:2405.15362
(NeurIPS'24). The authors squeeze by other rules, to the same length or nearly so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from hocket.core.dataflow import is_given, makes, needs
from hocket.core.op import Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.core.step_end import repeat_step
from hocket.schedules.entry import Shape
from hocket.schedules.v_shape import Move, stages_of, v_chain

PERIOD: Final = 6  # slots: F, I and W of two stages

Block: TypeAlias = Mapping[Move, int]  # each op of a microbatch, and its slot


def block(shape: Shape, device: int, starts: tuple[int, int, int, int]) -> Block:
    """Return a device's slots: four as given, and weight gradients in free ones.

    Args:
        shape: the shape, with its number of devices.
        device: the block's device.
        starts: the slots of F down, F up, I up and I down.
    """
    down, up = stages_of(shape, device)
    moves = (
        (Kind.FORWARD, down),
        (Kind.FORWARD, up),
        (Kind.BACKWARD_INPUT, up),
        (Kind.BACKWARD_INPUT, down),
    )
    slots = dict(zip(moves, starts, strict=True))
    for stage in (up, down):
        slot = slots[Kind.BACKWARD_INPUT, stage] + 1
        while any((slot - other) % PERIOD == 0 for other in slots.values()):
            slot += 1
        slots[Kind.BACKWARD_WEIGHT, stage] = slot
    return slots


def room(slots: Block, stage: int, last: Kind = Kind.BACKWARD_INPUT) -> int:
    """Return how many microbatches are on a stage at once, from F to I or to W.

    Args:
        slots: the device's block.
        stage: one of its stages.
        last: I or W.
    """
    length = slots[last, stage] + 1 - slots[Kind.FORWARD, stage]
    return -(-length // PERIOD)


def peak_of(block_of: Callable[[Shape, int], Block]) -> Callable[[Shape, int], float]:
    """Return the function of the activation units that a device's block holds."""

    def peak_activations(shape: Shape, device: int) -> float:
        slots = block_of(shape, device)
        rooms = (room(slots, stage) for stage in stages_of(shape, device))
        return sum(min(most, shape.num_microbatches) for most in rooms) / 2

    return peak_activations


def squeezed(
    name: str, shape: Shape, block_of: Callable[[Shape, int], Block]
) -> Schedule:
    """Return the order in which the devices go through their repeated blocks.

    Args:
        name: the schedule's name, for the error.
        shape: its numbers.
        block_of: returns a device's block.

    Raises:
        ShapeError: not two stages per device.
    """
    program = v_chain(name, shape)
    blocks = [block_of(shape, device) for device in range(shape.num_devices)]
    lanes = _squeezed(_Work.of(program, blocks), blocks, shape.num_microbatches)
    return repeat_step(program, lanes.__getitem__)


@dataclass(frozen=True, slots=True)
class _Work:
    """In which slot each move was made, microbatch by microbatch.

    Args:
        made: the slots of every move.
        before: the slots of those moves that each move waits for.
        ahead: the slots of I and W, and how far their forward may be ahead of them.
    """

    made: Mapping[Move, list[int]]
    before: Mapping[Move, list[list[int]]]
    ahead: Mapping[Move, list[tuple[list[int], int]]]

    @classmethod
    def of(cls, program: Program, blocks: Sequence[Block]) -> _Work:
        """Begin with nothing made."""
        made: dict[Move, list[int]] = {move: [] for slots in blocks for move in slots}
        makers = {
            value: made[move] for move in made for value in makes(_first(move), program)
        }
        before = {
            move: [makers[v] for v in needs(_first(move), program) if not is_given(v)]
            for move in made
        }
        ahead: dict[Move, list[tuple[list[int], int]]] = {move: [] for move in made}
        for slots in blocks:
            for kind, stage in slots:
                if kind is not Kind.FORWARD:
                    most = room(slots, stage, kind)
                    ahead[Kind.FORWARD, stage].append((made[kind, stage], most))
        return cls(made, before, ahead)

    def is_ready(self, move: Move, now: int) -> bool:
        """Return whether a move's next microbatch has all that it needs, and room."""
        i = len(self.made[move])
        return all(
            len(made) > i and made[i] < now for made in self.before[move]
        ) and all(i - len(made) < most for made, most in self.ahead[move])


def _first(move: Move) -> Op:
    kind, stage = move
    return Op(kind, stage, 0)


def _squeezed(work: _Work, blocks: Sequence[Block], num: int) -> list[list[Op]]:
    """Return the lanes, slot by slot."""
    lanes: list[list[Op]] = [[] for _ in blocks]

    def best(slots: Block, now: int) -> Move | None:
        """Return what comes first in a block; weight gradients come last."""
        for move in sorted(slots, key=lambda move: rank(slots, move)):
            if len(work.made[move]) < num and work.is_ready(move, now):
                return move
        return None

    def rank(slots: Block, move: Move) -> tuple[bool, int]:
        is_last = move[0] is Kind.BACKWARD_WEIGHT
        return is_last, slots[move] + PERIOD * len(work.made[move])

    now, num_left = 0, PERIOD * num * len(blocks)
    while num_left:
        for slots, lane in zip(blocks, lanes, strict=True):
            move = best(slots, now)
            if move is not None:
                kind, stage = move
                lane.append(Op(kind, stage, len(work.made[move])))
                work.made[move].append(now)
                num_left -= 1
        now += 1
    return lanes
