"""WPipe: no flush, and only the front half of the model is one update behind."""

from __future__ import annotations

from functools import partial
from typing import Final

from hocket.core.costs import StageCost
from hocket.core.schedule import Schedule
from hocket.errors import ShapeError
from hocket.schedules.entry import Entry, Shape, run_bubble_s
from hocket.schedules.flush_free import flush_free
from hocket.schedules.pipedream_2bw import refuse_too_few


def wpipe(shape: Shape, *, late_updates: bool = False) -> Schedule:
    """Alternate two groups of stages, so that only the first is one update behind.

    Device `d` has stage `d` of the front half and stage `d + p` of the back half. The
    next step's forwards of the front half come before this step's backwards of it, and
    so fill what a flush would leave idle; the back half's order stays, and needs no
    old weights. With `m = p` this is the paper's order; more microbatches are as good.

    Bubble per run: `(p - 1) * (F + B) / 2`, once. Device `d` begins with
    `m + p - 1 - d` forwards and holds half as many microbatches, and half a one. Of the
    weights, the front half is kept twice: 1.5 copies. A hop of `c` seconds costs
    `2 c (p - 1) / p` of each `(F + B) / 2`; `wpipe-overlapped` hides it.

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

    Raises:
        ShapeError: other than two stages per device, or fewer microbatches than
            devices.
    """
    return two_groups("wpipe", shape, lead=1, late_updates=late_updates)


def two_groups(name: str, shape: Shape, *, lead: int, late_updates: bool) -> Schedule:
    """Alternate two groups of stages: delay 1 in the front half, 0 in the back half.

    Args:
        name: the schedule's name, for errors.
        shape: a shape with two stages per device.
        lead: by how many forwards the warm-ups of neighbours differ.
        late_updates: as in `wpipe`.

    Raises:
        ShapeError: other than two stages per device, or too few microbatches.
    """
    p, m = shape.num_devices, shape.num_microbatches
    if shape.stages_per_device != 2:
        raise ShapeError(
            f"{name} has two groups of stages, one of each on a device, got "
            f"stages_per_device={shape.stages_per_device}: use 2"
        )
    refuse_too_few(name, shape, max(p, lead * (p - 1)))
    return flush_free(
        shape,
        [1] * p + [0] * p,
        lambda device: m + lead * (p - 1 - device),
        late_updates=late_updates,
    )


def bubble_s(shape: Shape, share: StageCost) -> float:
    """Return the bubble: the pipeline fills and drains once, by half a share."""
    return run_bubble_s(shape, share) / 2


def peak_activations(shape: Shape, device: int, *, lead: int) -> float:
    """Return half of the warm-up's forwards, and half a unit."""
    p, m = shape.num_devices, shape.num_microbatches
    return min(m + lead * (p - 1 - device) + 1, 2 * m * shape.num_steps) / 2


def _num_buffers(shape: Shape) -> int:
    """Return how many outputs device 0 has not read when its second stage begins."""
    p, m = shape.num_devices, shape.num_microbatches
    if p == 1:
        return 1
    if shape.num_steps == 1:
        return max(1, m - p)
    return max(-(-m // 2), m - p + 1)


ENTRY: Final = Entry(
    wpipe,
    bubble_s,
    partial(peak_activations, lead=1),
    _num_buffers,
    stages_per_device=2,
)
