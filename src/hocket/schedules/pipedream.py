"""PipeDream: an update after every microbatch, and many versions of the weights."""

from __future__ import annotations

from typing import Final

from hocket.core.schedule import Schedule
from hocket.errors import ShapeError
from hocket.schedules.entry import Entry, Shape, refuse_several_stages, run_bubble_s
from hocket.schedules.flush_free import flush_free
from hocket.schedules.pipedream_2bw import peak_activations


def pipedream(shape: Shape) -> Schedule:
    """Run 1F1B without a flush, where each step is one microbatch; for comparison.

    Stage `s` reads weights that are `p - 1 - s` updates old, and keeps `p - s`
    versions: the newest goes into each forward, and stays until its backward.

    Bubble per run: `(p - 1) * (F + B)`. Device `d` holds `p - d` microbatches.

    >>> shape = Shape(3, num_microbatches=1, num_steps=4)
    >>> print(pipedream(shape))  # doctest: +NORMALIZE_WHITESPACE
    steps 4
    replicas 1
    net model microbatches=1
    stage 0 net=model device=0 delay=2
    stage 1 net=model device=1 delay=1
    stage 2 net=model device=2
    flow 0>1
    flow 1>2
    repeats 2
    d0  0F0 0F0@1 |: 0F0@2 0B0 0U 0F0@3 0B0@1 0U@1 :| 0B0@2 0U@2 0B0@3 0U@3
    d1  1F0 |: 1F0@1 1B0 1U 1F0@2 1B0@1 1U@1 :| 1F0@3 1B0@2 1U@2 1B0@3 1U@3
    d2  |: 2F0 2B0 2U 2F0@1 2B0@1 2U@1 :| 2F0@2 2B0@2 2U@2 2F0@3 2B0@3 2U@3

    Source: Narayanan et al., "PipeDream", SOSP'19, section 3.3.

    Raises:
        ShapeError: several stages per device, or several microbatches per step.
    """
    refuse_several_stages("pipedream", shape)
    if shape.num_microbatches != 1:
        raise ShapeError(
            f"pipedream updates after every microbatch, got num_microbatches="
            f"{shape.num_microbatches}: use 1, or pipedream-2bw, which on "
            f"{shape.num_devices} devices takes {shape.num_devices} or more"
        )
    p = shape.num_devices
    return flush_free(
        shape, [p - 1 - stage for stage in range(p)], lambda device: p - 1 - device
    )


ENTRY: Final = Entry(pipedream, run_bubble_s, peak_activations)
