"""The page about jobs that shared a device."""

from __future__ import annotations

from math import inf

import pytest

from hocket.sharing.forecast import Forecast
from hocket.sharing.page import share_page, share_svg, simulated_report
from hocket.sharing.policy import Mode
from hocket.sharing.report import ShareReport
from hocket.sharing.simulate import SimulatedJob


def played(budget_bytes: float = 2.0**22) -> ShareReport:
    """Two jobs half an iteration apart, played with a fake clock."""
    forecast = Forecast.of_changes(1.0, 2.0, [0.0, 0.5, 1.9], [2**20, 2**20, -(2**21)])
    jobs = [
        SimulatedJob(name, forecast, 9, believed=forecast, static_bytes=1000.0)
        for name in ("a", "<b>")
    ]
    return simulated_report(Mode.LAG, jobs, budget_bytes)


@pytest.mark.parametrize("budget_bytes", [2.0**22, inf])
def test_shows_lanes_memory_delays_and_the_table(budget_bytes: float) -> None:
    """Each iteration has boxes for its wait, forward and backward."""
    report = played(budget_bytes)
    svg = share_svg(report)
    assert svg.count("<polygon") == 2
    assert svg.count("<rect") % 3 == 0
    assert svg.count("<rect") >= 3 * 8
    assert ("budget 4 MiB" in svg) == (budget_bytes < inf)
    page = share_page(report)
    assert "&lt;b&gt;" in page
    assert "Mode lag: simulated." in page


def test_the_report_counts_what_both_hold() -> None:
    """Half an iteration apart, the two blocks of one job meet the other's first."""
    report = played()
    assert report.peak_bytes == pytest.approx(2 * 1000 + 3 * 2**20, rel=0.01)
    assert report["a"].speed == pytest.approx(1.0)
    assert report.total_speed == pytest.approx(2.0)
    assert "together: 2.00 times" in str(report)
