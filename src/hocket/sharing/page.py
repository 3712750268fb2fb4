"""One page about jobs that shared a device: a table, lanes, delays and memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite

from hocket.draw.html import Figure, Table
from hocket.draw.html.page import still_page
from hocket.draw.quantity import byte_size
from hocket.sharing.picture import share_svg
from hocket.sharing.policy import Mode
from hocket.sharing.report import HEAD, JobReport, ShareReport, row_of
from hocket.sharing.simulate import SimulatedJob, simulate_jobs


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
    budget = ""
    if isfinite(report.budget_bytes):
        budget = f" of {byte_size(report.budget_bytes)}"
    summary = (
        f"Mode {report.mode.value}: {report.why}. Together the jobs ran "
        f"{report.total_speed:.2f} times as fast as one alone, and held "
        f"{byte_size(report.peak_bytes)}{budget}. {' '.join(report.notes)}"
    )
    return still_page(
        "Jobs that share a device",
        summary.strip(),
        Table("Jobs", HEAD, tuple(tuple(row_of(x)) for x in report.jobs)),
        figures=[Figure("Jobs and their memory over time", share_svg(report))],
        tables=tables,
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
            alone_s={"": job.actual.seconds},
            static_bytes=job.static_bytes,
            forecast=job.actual,
            num_wrong=run.num_wrong[job.name],
            error=None,
            is_hung=False,
        )
        for job in jobs
    ]
    return ShareReport(mode, "simulated", tuple(reports), budget_bytes)
