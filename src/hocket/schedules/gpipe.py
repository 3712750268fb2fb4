"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hocket.core.op import Kind, Op
from hocket.core.schedule import Schedule
from hocket.core.step_end import repeat_step
from hocket.schedules.entry import (
    Entry,
    Shape,
    all_microbatches,
    refuse_several_stages,
    step_bubble_s,
)


def gpipe(shape: Shape) -> Schedule:
    """Run all forwards, then all backwards: the plainest order, and the most memory.

    Bubble per step: `(p - 1) * (F + B)`. Every device holds all `m` microbatches.

    >>> print(gpipe(Shape(num_devices=3, num_microbatches=4)))
    d0  0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3 0U
    d1  1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3 1U
    d2  2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3 2U

    Source: Huang et al., arXiv:1811.06965, Fig. 2c; torch's `ScheduleGPipe`. The
    figure runs the backwards from the last microbatch to the first. Here, as in torch,
    the first comes first: bubble and memory are the same, and gradients add up in the
    order of the plain loop.

    Raises:
        ShapeError: several stages per device.
    """
    refuse_several_stages("gpipe", shape)

    def order(device: int) -> Iterator[Op]:
        for microbatch in range(shape.num_microbatches):
            yield Op(Kind.FORWARD, device, microbatch)
        for microbatch in range(shape.num_microbatches):
            yield Op(Kind.BACKWARD, device, microbatch)

    return repeat_step(shape.chain(), order)


ENTRY: Final = Entry(gpipe, step_bubble_s, all_microbatches)
