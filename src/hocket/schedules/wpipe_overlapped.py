"""WPipe with a longer warm-up, which hides the time that messages take."""

from __future__ import annotations

from functools import partial
from typing import Final

from hocket.core.schedule import Schedule
from hocket.schedules.entry import Entry, Shape
from hocket.schedules.wpipe import bubble_s, largest_block, peak_activations, two_groups


def wpipe_overlapped(
    shape: Shape, *, late_updates: bool = False, num_blocks: int | None = None
) -> Schedule:
    """Run WPipe with a longer warm-up, which hides messages.

    The warm-ups of two neighbours differ by two forwards and not one, so that a device
    has another microbatch to compute while one is on its way. With blocks of
    `b >= 2 (p - 1)` the delays stay one for the front half and none for the back half;
    with smaller ones they would mix.

    Bubble per run: `(p - 1) * (F + B) / 2` where messages take no time, and none is
    added by hops of up to a quarter of `F + B` (with `p = 3` and `b = 4`, unless one of
    `F` and `B` is more than five times the other). Device `d` begins with
    `b + 2 (p - 1 - d)` forwards and holds half as many microbatches, and half a one.

    >>> shape = Shape(2, 2, stages_per_device=2, num_steps=2)
    >>> print(wpipe_overlapped(shape))  # doctest: +NORMALIZE_WHITESPACE
    steps 2
    replicas 1
    net model microbatches=2
    stage 0 net=model device=0 delay=1
    stage 1 net=model device=1 delay=1
    stage 2 net=model device=0
    stage 3 net=model device=1
    flow 0>1
    flow 1>2
    flow 2>3
    d0  0F0 0F1 2F0 2F1 |: 0F0@1 2B0 0F1@1 2B1 2U 2F0@1 0B0 2F1@1 0B1 0U :| 2B0@1
          2B1@1 2U@1 0B0@1 0B1@1 0U@1
    d1  1F0 1F1 |: 3F0 3B0 3F1 3B1 3U 1F0@1 1B0 1F1@1 1B1 1U :| 3F0@1 3B0@1 3F1@1
          3B1@1 3U@1 1B0@1 1B1@1 1U@1

    Source: the order of `wpipe` (Yang et al., "WPipe", ICLR'22), with the warm-up of
    Megatron's interleaved 1F1B (Narayanan et al., arXiv:2104.04473, section 2.2.2).

    Args:
        shape: a shape with two stages per device.
        late_updates: whether updates wait until all gradients of their delay are there,
            as clipping them together needs; no other op waits.
        num_blocks: the blocks of a step, of nearly equal size; the most that there can
            be when not given.

    Raises:
        ShapeError: other than two stages per device, or fewer microbatches than
            `max(p, 2 (p - 1))` in a step or a block.
    """
    return two_groups(
        "wpipe-overlapped",
        shape,
        lead=2,
        late_updates=late_updates,
        num_blocks=num_blocks,
    )


def _num_buffers(shape: Shape) -> int:
    p, b = shape.num_devices, largest_block(shape, 2)
    more = b - 2 * (p - 1)
    if p == 1:
        return 1
    if b == shape.num_microbatches * shape.num_steps:  # nothing follows the block
        return max(1 + more // 2, more - 1)
    return max(-(-b // 2), more)


ENTRY: Final = Entry(
    wpipe_overlapped,
    bubble_s,
    partial(peak_activations, lead=2),
    _num_buffers,
    stages_per_device=2,
)
