"""WPipe: no flush, and only the front half of the model is one update behind."""

from __future__ import annotations

from functools import partial
from typing import Final

from hocket.core.costs import StageCost
from hocket.core.schedule import Schedule
from hocket.errors import ShapeError
from hocket.schedules.entry import Entry, Shape, run_bubble_s
from hocket.schedules.flush_free import block_sizes, flush_free
from hocket.schedules.pipedream_2bw import refuse_too_few


def wpipe(
    shape: Shape, *, late_updates: bool = False, num_blocks: int | None = None
) -> Schedule:
    """Alternate two groups of stages, so that only the first is one update behind.

    Device `d` has stage `d` of the front half and stage `d + p` of the back half. The
    next step's forwards of the front half come before this step's backwards of it, and
    so fill what a flush would leave idle; the back half's order stays, and needs no
    old weights. With `m = p` this is the paper's order. More microbatches go through
    it in blocks, and weights are updated behind a step's last block:

        forwards    s0 s0 s0  s1 s1 s1  s0 s0  s1 s1 │ s0 ...      m = 5, p = 2:
        backwards   s1 s1 s1  s0 s0 s0  s1 s1 U s0 s0 U ...        blocks of 3 and 2

    Bubble per run: `(p - 1) * (F + B) / 2`, once. With blocks of `b` microbatches, the
    largest one, device `d` begins with `b + p - 1 - d` forwards and holds half as many
    microbatches, and half a one, however many microbatches a step has. Of the weights,
    the front half is kept twice: 1.5 copies. A hop of `c` seconds costs
    `2 c (p - 1) / p` of each `(F + B) / 2`, in blocks of any size; `wpipe-overlapped`
    hides it. Fewer blocks only hide more of it while the pipeline fills, once per run.

    >>> shape = Shape(2, num_microbatches=2, stages_per_device=2, num_steps=2)
    >>> print(wpipe(shape))  # doctest: +NORMALIZE_WHITESPACE
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
    d0  0F0 0F1 2F0 |: 2F1 2B0 0F0@1 2B1 2U 0F1@1 0B0 2F0@1 0B1 0U :| 2F1@1 2B0@1
          2B1@1 2U@1 0B0@1 0B1@1 0U@1
    d1  1F0 1F1 |: 3F0 3B0 3F1 3B1 3U 1F0@1 1B0 1F1@1 1B1 1U :| 3F0@1 3B0@1 3F1@1
          3B1@1 3U@1 1B0@1 1B1@1 1U@1

    Source: Yang et al., "Group-based Interleaved Pipeline Parallelism for Large-scale
    DNN Training", ICLR'22.

    Args:
        shape: a shape with two stages per device.
        late_updates: whether updates wait until all gradients of their delay are there,
            as clipping them together needs; no other op waits.
        num_blocks: the blocks of a step, of nearly equal size; `m // p`, the most that
            there can be, when not given.

    Raises:
        ShapeError: other than two stages per device, fewer microbatches than devices,
            or blocks with fewer.
    """
    return two_groups(
        "wpipe", shape, lead=1, late_updates=late_updates, num_blocks=num_blocks
    )


def two_groups(
    name: str, shape: Shape, *, lead: int, late_updates: bool, num_blocks: int | None
) -> Schedule:
    """Alternate two groups of stages: delay 1 in the front half, 0 in the back half.

    A warm-up has at least the forwards of one block: a device's first backward needs
    them. It has at most those of a step's last and first block together: with more, the
    next step's forwards of the back half would come before the back half's update.

    Args:
        name: the schedule's name, for errors.
        shape: a shape with two stages per device.
        lead: by how many forwards the warm-ups of neighbours differ.
        late_updates: as in `wpipe`.
        num_blocks: as in `wpipe`.

    Raises:
        ShapeError: other than two stages per device, or too few microbatches.
    """
    p = shape.num_devices
    if shape.stages_per_device != 2:
        raise ShapeError(
            f"{name} has two groups of stages, one of each on a device, got "
            f"stages_per_device={shape.stages_per_device}: use 2"
        )
    refuse_too_few(name, shape, least_block(shape, lead))
    most = shape.num_microbatches // least_block(shape, lead)
    num_blocks = most if num_blocks is None else num_blocks
    if not 1 <= num_blocks <= most:
        raise ShapeError(
            f"{name} with {shape.num_microbatches} microbatches on {p} devices takes 1 "
            f"to {most} blocks, each of {least_block(shape, lead)} microbatches or "
            f"more, got num_blocks={num_blocks}"
        )
    (size, *_) = block_sizes(shape.num_microbatches, num_blocks)
    return flush_free(
        shape,
        [1] * p + [0] * p,
        lambda device: size + lead * (p - 1 - device),
        num_blocks=num_blocks,
        late_updates=late_updates,
    )


def least_block(shape: Shape, lead: int) -> int:
    """Return the fewest microbatches of a block with which the delays are 1 and 0."""
    return max(shape.num_devices, lead * (shape.num_devices - 1))


def largest_block(shape: Shape, lead: int) -> int:
    """Return the most microbatches of a block, where there are as many as can be."""
    num_blocks = shape.num_microbatches // least_block(shape, lead)
    return block_sizes(shape.num_microbatches, num_blocks)[0]


def bubble_s(shape: Shape, share: StageCost) -> float:
    """Return the bubble: the pipeline fills and drains once, by half a share."""
    return run_bubble_s(shape, share) / 2


def peak_activations(shape: Shape, device: int, *, lead: int) -> float:
    """Return half of the warm-up's forwards, and half a unit."""
    num_warmup = largest_block(shape, lead) + lead * (shape.num_devices - 1 - device)
    return min(num_warmup + 1, 2 * shape.num_microbatches * shape.num_steps) / 2


def _num_buffers(shape: Shape) -> int:
    """Return how many outputs device 0 has not read when its second stage begins."""
    p, b = shape.num_devices, largest_block(shape, 1)
    if p == 1:
        return 1
    if b == shape.num_microbatches * shape.num_steps:  # nothing follows the block
        return max(1, b - p)
    return max(-(-b // 2), b - p + 1)


ENTRY: Final = Entry(
    wpipe,
    bubble_s,
    partial(peak_activations, lead=1),
    _num_buffers,
    stages_per_device=2,
)
