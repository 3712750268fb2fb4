"""Summarize the numbers of a timeline that stand beside every picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hocket.core.program import Program
from hocket.core.timelines.memory import MemoryCurve, activation_units
from hocket.core.timelines.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Summary:
    """What a timeline comes to.

    Args:
        makespan_s: from the first op's start to the last op's end.
        step_s: the makespan divided by the number of steps.
        bubble: the share of the makespan in which a lane does not work, lanes' mean.
        steady_bubble: the same while the pipeline is full.
        lane_bubbles: `(lane's label, its bubble)`.
        peak_activations: each device's peak, in microbatches' activations.
        peak_bytes: each device's peak; empty if the timeline does not hold bytes.
        sent_bytes: the bytes sent from device to device, without reductions.
    """

    makespan_s: float
    step_s: float
    bubble: float
    steady_bubble: float
    lane_bubbles: tuple[tuple[str, float], ...]
    peak_activations: tuple[float, ...]
    peak_bytes: tuple[float, ...]
    sent_bytes: int


def summarize(timeline: Timeline) -> Summary:
    """Read the numbers off a timeline."""
    schedule = timeline.schedule
    return Summary(
        makespan_s=timeline.makespan_s,
        step_s=timeline.makespan_s / schedule.program.num_steps,
        bubble=timeline.bubble_fraction,
        steady_bubble=timeline.steady_bubble_fraction,
        lane_bubbles=tuple(
            (lane.label, timeline.lane_bubble_fraction(i))
            for i, lane in enumerate(schedule.lanes)
        ),
        peak_activations=tuple(
            map(timeline.peak_activations, range(schedule.program.num_devices))
        ),
        peak_bytes=_peak_bytes(timeline),
        sent_bytes=sum(
            num_bytes
            for (from_device, to_device), num_bytes in timeline.link_bytes().items()
            if from_device != to_device
        ),
    )


def _peak_bytes(timeline: Timeline) -> tuple[float, ...]:
    if not knows_bytes(timeline):
        return ()
    return tuple(curve.peak for curve in timeline.memory)


def num_microbatches_text(program: Program) -> str:
    """Write the microbatches per step of each net: `8`, or `8 + 4` of two."""
    return " + ".join(str(net.num_microbatches) for net in program.nets)


def memory_curves(timeline: Timeline) -> tuple[MemoryCurve, ...]:
    """Return each device's bytes over time, or its activation units."""
    if knows_bytes(timeline):
        return timeline.memory
    devices = range(timeline.schedule.program.num_devices)
    return tuple(activation_units(timeline, device) for device in devices)


# Less than this was not measured: `Costs.uniform` counts a byte for each microbatch.
_LEAST_BYTES: Final = 1024


def knows_bytes(timeline: Timeline) -> bool:
    """Return whether the timeline knows how many bytes are alive."""
    return any(curve.peak >= _LEAST_BYTES for curve in timeline.memory)
