"""Draw the memory of each device over time, as strips below the lanes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hocket.core.timelines.memory import MemoryCurve
from hocket.core.timelines.timeline import Timeline
from hocket.draw.quantity import Unit, byte_unit
from hocket.draw.scene import Anchor, Axis, Box, Path, Point, Role, Shape, Text
from hocket.draw.summary import knows_bytes, memory_curves

_GAP = 3.0
_SMALL = 10.5


def memory_unit(timeline: Timeline) -> Unit:
    """Return the unit of bytes that fits, or that of microbatches' activations."""
    if not knows_bytes(timeline):
        return Unit("", 1.0)
    return byte_unit(timeline.most_bytes)


def memory_title(timeline: Timeline) -> str:
    """Say what the curves show."""
    if knows_bytes(timeline):
        return f"memory, {memory_unit(timeline).name}"
    return "activations alive, in microbatches"


def memory_shapes(
    timeline: Timeline, axis: Axis, top: float, height: float
) -> Iterator[Shape]:
    """Draw one strip per device, all of one scale, from `top` down."""
    curves = memory_curves(timeline)
    unit = memory_unit(timeline)
    highest = max((curve.peak for curve in curves), default=0.0) or 1.0
    right = axis.right + 50
    yield Text(axis.left, top - 7, memory_title(timeline), _SMALL, Role.MUTED)
    yield Text(right, top - 7, "peak", _SMALL, Role.MUTED, Anchor.END)
    for device, curve in enumerate(curves):
        y = top + device * (height + _GAP)
        base = y + height
        middle = base - height / 2 + 4
        yield Text(axis.left - 8, middle, f"d{device}", 11.5, Role.INK, Anchor.END)
        end = axis.x(timeline.makespan_s)
        yield Box(axis.left, y, end - axis.left, height, Role.TRACK)
        time_s, amount = merged_changes(curve, timeline)
        outline = _outline(time_s, amount, axis, base, (height - 2) / highest)
        yield Path(outline, Role.CURVE, opacity=0.28)
        yield Path(outline[1:-1], Role.CURVE, width=1.1)
        peak = unit.number(curve.peak)
        yield Text(right, middle, peak, _SMALL, Role.MUTED, Anchor.END)


def merged_changes(
    curve: MemoryCurve, timeline: Timeline
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return when the amount changes since the timeline's begin, and the amounts.

    Of changes at one instant only the last is kept: what is freed and taken at once
    was never missing. The last amount lasts until the timeline's end.
    """
    time_s = np.append(curve.time_s - timeline.begin_s, timeline.makespan_s)
    time_s = np.clip(time_s, 0.0, timeline.makespan_s)
    amount = np.append(curve.amount, curve.amount[-1:] if curve.amount.size else 0.0)
    same = timeline.makespan_s * 1e-9
    keep = np.append(np.diff(time_s) > same, True)
    return time_s[keep], amount[keep]


def _outline(
    time_s: NDArray[np.float64],
    amount: NDArray[np.float64],
    axis: Axis,
    base: float,
    scale: float,
) -> tuple[Point, ...]:
    """Return the steps of a curve, closed along the base line."""
    points: list[Point] = [(axis.left, base)]
    y = base
    for instant_s, level in zip(time_s.tolist(), amount.tolist(), strict=True):
        x, next_y = axis.x(instant_s), base - level * scale
        points += [(x, y), (x, next_y)]
        y = next_y
    return (*points, (points[-1][0], base))
