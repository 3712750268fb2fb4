"""Stages in a V: every device has one on the way down and one on the way up.

    d0   0 ┐           ┌ 7
    d1     1 ┐       ┌ 6
    d2       2 ┐   ┌ 5
    d3         3 ─ 4           the turn sends no message: both ends are on one device

Orders for it are written as moves, which stages make in turn; `numbered` gives each its
microbatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

from hocket.core.op import SPLIT_BACKWARD, Kind, Op
from hocket.core.program import Program
from hocket.errors import ShapeError
from hocket.schedules.entry import Shape

STAGES_PER_DEVICE: Final = 2

Move: TypeAlias = tuple[Kind, int]  # the kind and the stage


def v_chain(name: str, shape: Shape) -> Program:
    """Return the program whose stages go down the devices and up again.

    Args:
        name: the schedule's name, for the error.
        shape: its numbers.

    Raises:
        ShapeError: not two stages per device.
    """
    if shape.stages_per_device != STAGES_PER_DEVICE:
        raise ShapeError(
            f"{name} puts two stages on each device, in a V; got stages_per_device="
            f"{shape.stages_per_device}: use 2, or interleaved-zb, which takes any"
        )
    down = range(shape.num_devices)
    return shape.chain([*down, *reversed(down)])


def stages_of(shape: Shape, device: int) -> tuple[int, int]:
    """Return a device's stage on the way down, and its stage on the way up."""
    return device, 2 * shape.num_devices - 1 - device


def numbered(moves: Iterable[Move], num_microbatches: int) -> Iterator[Op]:
    """Number moves: each stage does each kind for microbatch 0, 1, 2 ... in turn.

    Args:
        moves: the moves in order; B counts as both I and W.
        num_microbatches: moves for more than these are left out.
    """
    counts: Counter[Move] = Counter()
    for kind, stage in moves:
        parts = _PARTS.get(kind, (kind,))
        microbatch = counts[parts[0], stage]
        counts.update((part, stage) for part in parts)
        if microbatch < num_microbatches:
            yield Op(kind, stage, microbatch)


_PARTS: Final = {Kind.BACKWARD: SPLIT_BACKWARD}
