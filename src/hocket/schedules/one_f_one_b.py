"""1F1B: each backward as early as it can, so that few activations stay alive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from hocket.core.op import Kind, Op
from hocket.core.schedule import Schedule
from hocket.core.step_end import repeat_step
from hocket.schedules.entry import (
    Entry,
    Shape,
    refuse_several_stages,
    step_bubble_s,
    warmup_microbatches,
)


def one_f_one_b(shape: Shape) -> Schedule:
    """Start each backward as early as it can, so that few activations stay alive.

    Bubble per step: `(p - 1) * (F + B)`, the same as GPipe's. Device `d` never holds
    more than `p - d` microbatches, however many there are.

    >>> print(one_f_one_b(Shape(num_devices=3, num_microbatches=4)))
    d0  0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3 0U
    d1  1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3 1U
    d2  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2U

    Source: Narayanan et al., arXiv:2104.04473, section 2.2.1 and Fig. 4, top; earlier
    "PipeDream-Flush" (arXiv:2006.09503) and DAPPLE (arXiv:2007.01045). torch's
    `Schedule1F1B` runs this order, but prints another for its last rank (as of 2.13).

    Raises:
        ShapeError: several stages per device.
    """
    refuse_several_stages("1f1b", shape)

    def order(device: int) -> Iterator[Op]:
        microbatches = range(shape.num_microbatches)
        return alternate(
            [Op(Kind.FORWARD, device, microbatch) for microbatch in microbatches],
            [Op(Kind.BACKWARD, device, microbatch) for microbatch in microbatches],
            num_warmup=shape.num_devices - 1 - device,
        )

    return repeat_step(shape.chain(), order)


def alternate(
    forwards: Sequence[Op], backwards: Sequence[Op], *, num_warmup: int
) -> Iterator[Op]:
    """Yield warm-up forwards, then pairs of F and B, then the backwards left.

        num_warmup 2:   F F | F B  F B  F B | B B

    Args:
        forwards: all of them, in order.
        backwards: as many, in order.
        num_warmup: forwards before the first pair; all, where there are fewer.
    """
    yield from forwards[:num_warmup]
    for i, backward in enumerate(backwards):
        yield from forwards[num_warmup + i : num_warmup + i + 1]
        yield backward


ENTRY: Final = Entry(one_f_one_b, step_bubble_s, warmup_microbatches)
