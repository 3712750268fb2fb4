"""Summarize the numbers of a timeline that stand beside every picture."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from hocket.core.program import Program
from hocket.core.timelines.memory import MemoryCurve
from hocket.core.timelines.timeline import Timeline
from hocket.draw.quantity import counted


def peak_activations(timeline: Timeline) -> list[float]:
    """Return each device's peak, in microbatches' activations."""
    devices = range(timeline.schedule.program.num_devices)
    return [*map(timeline.peak_activations, devices)]


def peak_microbatches(timeline: Timeline) -> list[float]:
    """Return each device's most microbatches from their F to their B, or W."""
    devices = range(timeline.schedule.program.num_devices)
    return [*map(timeline.peak_microbatches, devices)]


def peak_bytes(timeline: Timeline) -> list[float]:
    """Return each device's peak; nothing if the timeline does not know bytes."""
    return [x.peak for x in timeline.memory] if knows_bytes(timeline) else []


def sent_bytes(timeline: Timeline) -> int:
    """Return the bytes sent from device to device, without reductions."""
    return sum(n for (a, b), n in timeline.link_bytes().items() if a != b)


def num_microbatches_text(program: Program) -> str:
    """Write the microbatches per step of each net: `8`, or `8 + 4` of two."""
    return " + ".join(str(net.num_microbatches) for net in program.nets)


def sizes_text(program: Program) -> str:
    """Write the sizes of a program: `4 devices, 8 stages, 8 microbatches, 1 step`."""
    counts: list[tuple[int | str, str]] = [
        (program.num_devices, "device"),
        (program.num_stages, "stage"),
        (num_microbatches_text(program), "microbatch"),
        (program.num_steps, "step"),
    ]
    return ", ".join(counted(count, noun) for count, noun in counts)


def memory_curves(timeline: Timeline) -> tuple[MemoryCurve, ...]:
    """Return each device's bytes over time, or its activation units."""
    if knows_bytes(timeline):
        return timeline.memory
    devices = range(timeline.schedule.program.num_devices)
    return tuple(map(timeline.activation_units, devices))


# Less than this was not measured: `Costs.uniform` counts a byte for each microbatch.
_LEAST_BYTES: Final = 1024


def knows_bytes(timeline: Timeline) -> bool:
    """Return whether the timeline knows how many bytes are alive."""
    return any(curve.peak >= _LEAST_BYTES for curve in timeline.memory)


# Find where each step lies on each lane, so that pictures can shade steps.
def step_ends(timeline: Timeline) -> tuple[NDArray[np.float64], ...]:
    """Return when each lane ends each step: after its last op of that step.

    Steps that overlap on a lane, as in flush-free orders, are cut where the earlier
    one ends. Step `t` lies between end `t - 1` and end `t`; times are as in the
    timeline's spans.

    Returns:
        One array per lane, one ascending entry per step.
    """
    num_steps = timeline.schedule.program.num_steps
    ends = []
    for lane, end_s in zip(timeline.schedule.lanes, timeline.end_s, strict=True):
        last = np.full(num_steps, timeline.begin_s)
        steps = np.fromiter((op.step for op in lane.ops), dtype=np.intp)
        np.maximum.at(last, steps, end_s)
        ends.append(np.maximum.accumulate(last))
    return tuple(ends)
