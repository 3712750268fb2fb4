"""WPipe: no flush, and only the front half of the model is one update behind."""

from __future__ import annotations

from typing import Final

from hocket.core.costs import StageCost
from hocket.core.schedule import Schedule
from hocket.errors import ShapeError
from hocket.schedules.entry import Entry, Shape, microbatch_s
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
    refuse_other_groups("wpipe", shape)
    p, m = shape.num_devices, shape.num_microbatches
    refuse_too_few("wpipe", shape, p)
    return flush_free(
        shape,
        group_delays(shape),
        lambda device: m + p - 1 - device,
        late_updates=late_updates,
    )


def group_delays(shape: Shape) -> list[int]:
    """Return a delay of 1 for the front half's stages, and 0 for the back half's."""
    return [1] * shape.num_devices + [0] * shape.num_devices


def refuse_other_groups(name: str, shape: Shape) -> None:
    """Refuse other than two groups of stages.

    Raises:
        ShapeError: there are others than two stages per device.
    """
    if shape.stages_per_device != 2:
        raise ShapeError(
            f"{name} has two groups of stages, one of each on a device, got "
            f"stages_per_device={shape.stages_per_device}: use 2"
        )


def bubble_s(shape: Shape, share: StageCost) -> float:
    """Return the bubble: the pipeline fills and drains once, by half a share."""
    return (shape.num_devices - 1) * microbatch_s(share) / 2


def _peak_activations(shape: Shape, device: int) -> float:
    p, m = shape.num_devices, shape.num_microbatches
    return min(m + p - device, 2 * m * shape.num_steps) / 2


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
    _peak_activations,
    _num_buffers,
    stages_per_device=2,
)
