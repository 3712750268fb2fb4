"""Jobs that shared a device, drawn: a lane for each, and their memory, stacked.

a       ▒▒███████░░▒▒███████       ▒ forward  █ backward  ░ idle: another job
b       ░░░▒▒███████▒▒███████
GiB 8 - - - - - - - - - - - -      the budget
4 ┤▂▃▅▆▅▄▃▅▆▅▃▂                each colour a job, its weights at the bottom
0 ┴──────┬──────┬──────
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import isfinite
from typing import Final

import numpy as np

from hocket.core.timelines.arrays import Floats
from hocket.core.timelines.idle import Cause
from hocket.core.timelines.memory import MemoryCurve
from hocket.draw.html import Figure, Table
from hocket.draw.html.page import still_page
from hocket.draw.quantity import byte_size, byte_unit, seconds, ticks, time_unit
from hocket.sharing.board import Iteration
from hocket.sharing.forecast import summed
from hocket.sharing.report import HEAD, JobReport, ShareReport, placed_curves, row_of

_NUM_SHOWN: Final = 8  # iterations of the slowest job
_WIDTH, _LEFT, _RIGHT, _LANE, _MEMORY = 920, 110, 14, 30, 190
_TOP: Final = 26  # for the legend
_HEAD: Final = 1.08  # room above the highest line
_PARTS: Final = (
    *(f"idle: {cause.value}" for cause in (Cause.DATA, Cause.JOB)),
    *("forward", "backward and update"),
)
_OPACITIES: Final = (0.45, 1.0)  # forward, backward
_COLOURS: Final = ("#4C78A8", "#E07B39", "#5B9A57", "#9A6BB0", "#B9A13B", "#5FA8B5")
_INK, _MUTED, _GRID = (
    f"var(--{name}, {colour})"
    for name, colour in (("ink", "#1B2027"), ("muted", "#626B76"), ("grid", "#DBDFE4"))
)


@dataclass(frozen=True, slots=True)
class _Axes:
    """Where times and bytes are drawn."""

    begin_s: float
    end_s: float
    most_bytes: float
    top: float

    @property
    def bottom(self) -> float:
        return self.top + _MEMORY

    def x(self, time_s: float) -> float:
        scale = (_WIDTH - _LEFT - _RIGHT) / max(self.end_s - self.begin_s, 1e-9)
        return _LEFT + max(time_s - self.begin_s, 0.0) * scale

    def y(self, num_bytes: float) -> float:
        return self.top + _MEMORY * (1 - num_bytes / self.most_bytes)

    def corners(self, times: Floats, amounts: Floats) -> list[tuple[float, float]]:
        """Return the corners of a curve of steps."""
        x = [self.x(time_s) for time_s in np.repeat(times, 2)[1:]]
        return list(zip(x, map(self.y, np.repeat(amounts, 2)[:-1]), strict=True))


def share_svg(report: ShareReport) -> str:
    """Draw the last iterations: a lane for each job, and their memory, stacked."""
    shown = _shown(report)
    moments = [t for own in shown.values() for x in own for t in (x.start_s, x.end_s)]
    begin_s, end_s = min(moments, default=0.0), max(moments, default=1.0)
    times, layers = _stacked(report, shown, begin_s, end_s)
    most = max(float(layers[-1].max(initial=1.0)) if layers else 1.0, 1.0)
    if isfinite(report.budget_bytes):
        most = max(most, report.budget_bytes)
    top = _TOP + len(report.jobs) * _LANE + 14
    axes = _Axes(begin_s, end_s, most * _HEAD, top)
    height = axes.bottom + 24
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" font-size="12" '
        f'aria-label="{escape(_spoken(report), quote=True)}">',
        *_legend(),
        *_scales(axes),
    ]
    for i, job in enumerate(report.jobs):
        parts += _lane(axes, job.name, shown[job.name], i)
    below = np.zeros(times.size)
    for i, above in enumerate(layers):
        outline = [*axes.corners(times, above), *axes.corners(times, below)[::-1]]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in outline)
        colour, below = _COLOURS[i % len(_COLOURS)], above
        parts.append(f'<polygon points="{points}" fill="{colour}" fill-opacity="0.7"/>')
    if isfinite(report.budget_bytes):
        parts += _budget(axes, report.budget_bytes)
    return "\n".join([*parts, "</svg>"])


def _spoken(report: ShareReport) -> str:
    names = ", ".join(job.name for job in report.jobs)
    return f"iterations and memory of {names}: at most {byte_size(report.peak_bytes)}"


def _legend() -> Iterator[str]:
    """Explain the three fills above the lanes; delays have slanted lines."""
    yield (
        '<defs><pattern id="delay" width="5" height="5" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="1.6" height="5" fill="{_MUTED}"/>'
        "</pattern></defs>"
    )
    names = ("forward", "backward and update", f"idle: {Cause.JOB.value}")
    fills = [f'fill="{_MUTED}" fill-opacity="{x}"' for x in _OPACITIES]
    x = float(_LEFT)
    for name, fill in zip(names, [*fills, 'fill="url(#delay)"'], strict=True):
        yield f'<rect x="{x:.0f}" y="4" width="22" height="11" rx="2" {fill}/>'
        yield _text(x + 28, 14, name, _MUTED)
        x += 50 + 6.5 * len(name)


def _scales(axes: _Axes) -> Iterator[str]:
    """Draw the lines and numbers of both axes."""
    size = byte_unit(axes.most_bytes / _HEAD)
    for amount in ticks(axes.most_bytes / size.size, 4):
        y = axes.y(amount * size.size)
        yield _line(_LEFT, _WIDTH - _RIGHT, y, y, f'stroke="{_GRID}"')
        number = size.text(amount * size.size)
        yield _text(_LEFT - 8, y + 4, number, _MUTED, anchor="end")
    span_s = axes.end_s - axes.begin_s
    unit = time_unit(span_s)
    for time in ticks(span_s / unit.size, 8):
        x = axes.x(axes.begin_s + time * unit.size)
        yield _line(x, x, _TOP, axes.bottom, f'stroke="{_GRID}"')
        number = unit.text(time * unit.size) if time else "0"
        yield _text(x, axes.bottom + 16, number, _MUTED, anchor="middle")


def _lane(
    axes: _Axes, name: str, iterations: Sequence[Iteration], number: int
) -> Iterator[str]:
    y, colour = _TOP + number * _LANE, _COLOURS[number % len(_COLOURS)]
    yield f'<rect x="4" y="{y + 9}" width="10" height="10" rx="2" fill="{colour}"/>'
    yield _text(20, y + 18, name if len(name) < 14 else f"{name[:12]}…", _INK)
    befores_s = [x.request_s for x in iterations[:1]] + [x.end_s for x in iterations]
    for before_s, x in zip(befores_s, iterations, strict=False):
        moments = [before_s, x.request_s, x.start_s, x.backward_s, x.end_s]
        ends = [axes.x(max(t, axes.begin_s)) for t in moments]
        fills = [f'fill="{colour}" fill-opacity="{one}"' for one in _OPACITIES]
        fills = ['fill="none" pointer-events="all"', 'fill="url(#delay)"', *fills]
        boxes = zip(_PARTS, pairwise(moments), pairwise(ends), fills, strict=True)
        for part, (begin_s, end_s), (left, right), fill in boxes:
            hint = f"iteration {x.number}, {part}: {seconds(max(end_s - begin_s, 0.0))}"
            yield (
                f'<rect x="{left:.1f}" y="{y + 3}" height="{_LANE - 8}" '
                f'width="{max(right - left, 0.0):.1f}" {fill}>'
                f"<title>{hint}</title></rect>"
            )
        yield _line(
            ends[-1], ends[-1], y + 3, y + _LANE - 5, 'stroke="var(--page, #FFF)"'
        )


def _budget(axes: _Axes, budget_bytes: float) -> Iterator[str]:
    y = axes.y(budget_bytes)
    style = f'stroke="{_INK}" stroke-width="1.5" stroke-dasharray="6 3"'
    yield _line(_LEFT, _WIDTH - _RIGHT, y, y, style)
    text = f"budget {byte_size(budget_bytes)}"
    yield _text(_WIDTH - _RIGHT, y - 5, text, _INK, anchor="end")


def _stacked(
    report: ShareReport,
    shown: Mapping[str, Sequence[Iteration]],
    begin_s: float,
    end_s: float,
) -> tuple[Floats, list[Floats]]:
    """Return moments, and at each the bytes of the first job, the first two, ..."""
    curves = [_curve(job, shown[job.name]) for job in report.jobs]
    times = np.unique(np.concatenate([[begin_s, end_s], *(x.time_s for x in curves)]))
    times = times[(times >= begin_s) & (times <= end_s)]
    amounts = [np.array([curve.at(t) for t in times]) for curve in curves]
    return times, list(np.cumsum(amounts, axis=0))


def _curve(job: JobReport, iterations: Sequence[Iteration]) -> MemoryCurve:
    moving = summed(placed_curves(job, iterations))
    return MemoryCurve(
        np.append(-np.inf, moving.time_s),
        np.append(0.0, moving.amount) + job.static_bytes,
    )


def _shown(report: ShareReport) -> dict[str, list[Iteration]]:
    """Return each job's iterations in the last stretch in which all were at work."""
    until_s = min(map(_last_s, report.jobs), default=0.0)
    own = {
        job.name: [x for x in job.shared if x.end_s <= until_s] for job in report.jobs
    }
    slowest = max((each[-_NUM_SHOWN:] for each in own.values()), key=_span_s)
    since_s = until_s - _span_s(slowest)
    return {
        name: [x for x in each if since_s <= x.start_s] for name, each in own.items()
    }


def _last_s(job: JobReport) -> float:
    """Return until when a job does what it does most: not in its last evaluation."""
    ends_s = {x.kind: x.end_s for x in job.shared}
    if len(ends_s) < 2:
        return job.until_s
    [(kind, _)] = Counter(x.kind for x in job.shared).most_common(1)
    return min(job.until_s, ends_s[kind])


def _span_s(iterations: Sequence[Iteration]) -> float:
    return iterations[-1].end_s - iterations[0].start_s if iterations else 0.0


def _line(x: float, until_x: float, y: float, until_y: float, style: str) -> str:
    place = f'x1="{x:.1f}" x2="{until_x:.1f}" y1="{y:.1f}" y2="{until_y:.1f}"'
    return f"<line {place} {style}/>"


def _text(x: float, y: float, text: str, fill: str, anchor: str = "start") -> str:
    place = f'x="{x:.0f}" y="{y:.0f}" fill="{fill}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(text)}</text>"


# One page about jobs that shared a device: a table, lanes, delays and memory.
def share_page(report: ShareReport) -> str:
    """Return a report as one self-contained HTML page."""
    tables = []
    if report.predictions:
        rows = tuple(
            (
                x.mode.value,
                f"{x.total_speed:.2f}",
                byte_size(x.peak_bytes),
                "yes" if x.holds_budget else "no",
                "yes" if x.holds_weights else "no",
            )
            for x in report.predictions
        )
        columns = ("mode", "sum of speeds", "peak", "in budget", "shares kept")
        tables.append(Table("Predicted from the trial", columns, rows))
    summary = (
        f"Mode {report.mode.value}: {report.why}. Together the jobs ran "
        f"{report.total_speed:.2f} times as fast as one alone, and held "
        f"{report.held} at most. {' '.join(report.notes)}"
    )
    return still_page(
        "Jobs that share a device",
        summary.strip(),
        Table("Jobs", HEAD, tuple(tuple(row_of(x)) for x in report.jobs)),
        figures=[Figure("The last iterations, and their memory", share_svg(report))],
        tables=tables,
    )
