"""One page about jobs that shared a device: a table, lanes, delays and memory."""

from __future__ import annotations

from math import isfinite

from hocket.draw.html import Figure, Table
from hocket.draw.html.page import still_page
from hocket.draw.quantity import byte_size
from hocket.sharing.picture import share_svg
from hocket.sharing.report import HEAD, ShareReport, row_of


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
