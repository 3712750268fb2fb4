"""One page about jobs that shared a device: lanes, memory, delays, and a table.

a  ▁▁▁███████  ▁▁▁███████      ▁ forward  █ backward  ░ held by a gate
b  ░░▁▁▁███████  ▁▁▁███████
▂▃▅▆▅▄▃▅▆▅▃▂                   memory of the jobs, stacked; the line is the budget
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import inf, isfinite
from typing import Final

import numpy as np

from hocket.core.op import Kind, Op
from hocket.core.program import Net, Program, Stage
from hocket.core.schedule import Lane, Schedule
from hocket.core.timelines.arrays import Floats
from hocket.core.timelines.memory import MemoryCurve
from hocket.core.timelines.timeline import Origin, Timeline
from hocket.draw.html import Figure, Table, to_html
from hocket.draw.quantity import byte_size, seconds
from hocket.sharing.board import Iteration
from hocket.sharing.forecast import summed
from hocket.sharing.policy import Mode
from hocket.sharing.report import JobReport, ShareReport, placed_curves, row_of
from hocket.sharing.simulate import SimulatedJob, simulate_jobs

_NUM_SHOWN: Final = 12  # iterations of the slowest job
_WIDTH, _LEFT, _LANE, _MEMORY = 920, 90, 26, 160
_OPACITIES: Final = (0.15, 0.5, 1.0)  # waits, forward, backward
_COLOURS: Final = ("#4C78A8", "#E07B39", "#5B9A57", "#9A6BB0", "#B9A13B", "#5FA8B5")


def share_page(report: ShareReport) -> str:
    """Return a report as one self-contained HTML page.

    Raises:
        PlanError: no job has ended an iteration.
    """
    shown = _shown(report)
    head = ("job", "iterations", "alone", "shared", "speed", "delay", "peak", "")
    tables = [Table("Jobs", head, tuple(tuple(row_of(x)) for x in report.jobs))]
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
    return to_html(
        [("measured", _timeline(report, shown))] if any(shown.values()) else [],
        "jobs that share a device",
        summary=f"Mode {report.mode.value}: {report.why}.",
        tables=tables,
        figures=[Figure("Jobs and their memory over time", share_svg(report))],
    )


def simulated_report(
    mode: Mode, jobs: Sequence[SimulatedJob], budget_bytes: float = inf
) -> ShareReport:
    """Play jobs with a fake clock, and report it as if it were measured."""
    run = simulate_jobs(mode, jobs, budget_bytes)
    reports = [
        JobReport(
            name=job.name,
            weight=job.weight,
            losses=(),
            iterations=tuple(run.iterations[job.name]),
            first_shared=1,
            until_s=min(own[-1].end_s for own in run.iterations.values()),
            solo_s=job.actual.seconds,
            static_bytes=job.static_bytes,
            forecast=job.actual,
            num_wrong=run.num_wrong[job.name],
            error=None,
            is_hung=False,
        )
        for job in jobs
    ]
    return ShareReport(mode, "simulated", tuple(reports), budget_bytes)


@dataclass(frozen=True, slots=True)
class _Axes:
    """Where times and bytes are drawn."""

    begin_s: float
    end_s: float
    most_bytes: float
    top: float

    def x(self, time_s: float) -> float:
        scale = (_WIDTH - _LEFT - 10) / max(self.end_s - self.begin_s, 1e-9)
        return _LEFT + max(time_s - self.begin_s, 0.0) * scale

    def y(self, num_bytes: float) -> float:
        return self.top + _MEMORY * (1 - num_bytes / self.most_bytes)

    def corners(self, times: Floats, amounts: Floats) -> list[tuple[float, float]]:
        """Return the corners of a curve of steps."""
        found = []
        for i, time_s in enumerate(times):
            if i:
                found.append((self.x(time_s), self.y(amounts[i - 1])))
            found.append((self.x(time_s), self.y(amounts[i])))
        return found


def share_svg(report: ShareReport) -> str:
    """Draw the last iterations: a lane for each job, and their memory, stacked."""
    shown = _shown(report)
    moments = [t for own in shown.values() for x in own for t in (x.start_s, x.end_s)]
    begin_s, end_s = min(moments, default=0.0), max(moments, default=1.0)
    times, layers = _stacked(report, shown, begin_s, end_s)
    most = float(layers[-1].max(initial=1.0))
    if isfinite(report.budget_bytes):
        most = max(most, report.budget_bytes)
    axes = _Axes(begin_s, end_s, most, len(report.jobs) * _LANE + 10)
    height = axes.top + _MEMORY + 30
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" font-size="12">']
    for i, job in enumerate(report.jobs):
        y, colour = i * _LANE, _COLOURS[i % len(_COLOURS)]
        parts.append(_text(4, y + 17, job.name))
        for x in shown[job.name]:
            moments = [x.request_s, x.start_s, x.backward_s, x.end_s]
            ends = [axes.x(t) for t in moments]
            for (left, right), opacity in zip(pairwise(ends), _OPACITIES, strict=True):
                parts.append(_box(left, right, y, colour, opacity))
    below = np.zeros(times.size)
    for i, above in enumerate(layers):
        outline = [*axes.corners(times, above), *axes.corners(times, below)[::-1]]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in outline)
        colour, below = _COLOURS[i % len(_COLOURS)], above
        parts.append(f'<polygon points="{points}" fill="{colour}" fill-opacity="0.6"/>')
    parts.append(_text(4, axes.top + 12, byte_size(most)))
    if isfinite(report.budget_bytes):
        parts += _budget(axes, report.budget_bytes)
    legend = (
        f"{seconds(end_s - begin_s)}; pale: held by a gate, medium: forward, full: "
        "backward and update"
    )
    return "\n".join([*parts, _text(_LEFT, height - 6, legend), "</svg>"])


def _budget(axes: _Axes, budget_bytes: float) -> Iterator[str]:
    y = axes.y(budget_bytes)
    yield (
        f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" '
        'stroke="var(--ink, #1B2027)" stroke-dasharray="5 3"/>'
    )
    yield _text(_WIDTH - 150, y + 14, f"budget {byte_size(budget_bytes)}")


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
    own = {job.name: list(job.shared) for job in report.jobs}
    until_s = min((job.until_s for job in report.jobs), default=0.0)
    slowest = max((job.shared[-_NUM_SHOWN:] for job in report.jobs), key=_span_s)
    since_s = until_s - _span_s(slowest)
    return {
        name: [x for x in each if since_s <= x.start_s and x.end_s <= until_s]
        for name, each in own.items()
    }


def _span_s(iterations: Sequence[Iteration]) -> float:
    return iterations[-1].end_s - iterations[0].start_s if iterations else 0.0


def _timeline(report: ShareReport, shown: dict[str, list[Iteration]]) -> Timeline:
    """Return the iterations as a timeline: one net and one lane for each job."""
    names = [name for name, own in shown.items() if own]
    program = Program(
        tuple(Net(f"job{i}", 1) for i in range(len(names))),
        tuple(Stage(f"job{i}", 0) for i in range(len(names))),
        (),
        num_steps=max(len(shown[name]) for name in names),
    )
    lanes = tuple(
        Lane(
            0,
            i,
            tuple(
                Op(kind, i, 0, step)
                for step in range(len(shown[name]))
                for kind in (Kind.FORWARD, Kind.BACKWARD)
            ),
        )
        for i, name in enumerate(names)
    )
    starts = [[t for x in shown[n] for t in (x.start_s, x.backward_s)] for n in names]
    ends = [[t for x in shown[n] for t in (x.backward_s, x.end_s)] for n in names]
    return Timeline(
        Schedule(program, lanes),
        tuple(np.array(x) for x in starts),
        tuple(np.array(x) for x in ends),
        origin=Origin.MEASURED,
    )


def _box(left: float, right: float, y: float, colour: str, opacity: float) -> str:
    width = max(right - left, 0.0)
    return (
        f'<rect x="{left:.1f}" y="{y + 3}" width="{width:.1f}" height="{_LANE - 6}" '
        f'fill="{colour}" fill-opacity="{opacity}"/>'
    )


def _text(x: float, y: float, text: str) -> str:
    place = f'x="{x:.0f}" y="{y:.0f}" fill="var(--ink, #1B2027)"'
    return f"<text {place}>{escape(text)}</text>"
