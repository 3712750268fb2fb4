"""PipeDream-2BW: 1F1B without a flush, and with two versions of the weights."""

from __future__ import annotations

from typing import Final

from hocket.core.schedule import Schedule
from hocket.errors import ShapeError
from hocket.schedules.entry import Entry, Shape, refuse_several_stages, run_bubble_s
from hocket.schedules.flush_free import flush_free


def pipedream_2bw(shape: Shape, *, late_updates: bool = False) -> Schedule:
    """Run 1F1B without a flush: all stages compute with weights one update old.

    Forward and backward of step `t` read the weights after `max(0, t - 1)` updates:
    the newest when the step begins, and the same until it ends, so that two versions
    are kept. The pipeline fills once per run, and not once per step.

    Bubble per run: `(p - 1) * (F + B)`. Device `d` holds `p - d` microbatches. A hop
    of `c` seconds costs `2 c (p - 1) / p` of each `F + B`.

    >>> shape = Shape(2, num_microbatches=2, num_steps=2)
    >>> print(pipedream_2bw(shape))  # doctest: +NORMALIZE_WHITESPACE
    steps 2
    replicas 1
    net model microbatches=2
    stage 0 net=model device=0 delay=1
    stage 1 net=model device=1 delay=1
    flow 0>1
    d0  0F0 |: 0F1 0B0 0F0@1 0B1 0U :| 0F1@1 0B0@1 0B1@1 0U@1
    d1  |: 1F0 1B0 1F1 1B1 1U :| 1F0@1 1B0@1 1F1@1 1B1@1 1U@1

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training",
    arXiv:2006.09503, sections 3.1 and 3.2.

    Args:
        shape: a shape with one stage per device.
        late_updates: whether updates wait until all gradients of their delay are there,
            as clipping them together needs; no other op waits.

    Raises:
        ShapeError: several stages per device, or fewer microbatches than devices: then
            the weights that a step reads would not be there when it begins.
    """
    refuse_several_stages("pipedream-2bw", shape)
    refuse_too_few("pipedream-2bw", shape, shape.num_devices)
    return flush_free(
        shape,
        [1] * shape.num_devices,
        lambda device: shape.num_devices - 1 - device,
        late_updates=late_updates,
    )


def refuse_too_few(name: str, shape: Shape, least: int) -> None:
    """Refuse too few microbatches to fill a step with the next one's work.

    Raises:
        ShapeError: there are fewer microbatches than `least`.
    """
    if shape.num_microbatches < least:
        raise ShapeError(
            f"{name} on {shape.num_devices} devices needs {least} microbatches a step "
            f"or more, got {shape.num_microbatches}: use {least}, or fewer devices"
        )


def peak_activations(shape: Shape, device: int) -> float:
    """Return `p - d`, or all microbatches of the run, if there are fewer."""
    return min(shape.num_devices - device, shape.num_microbatches * shape.num_steps)


ENTRY: Final = Entry(pipedream_2bw, run_bubble_s, peak_activations)
