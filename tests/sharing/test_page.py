"""The page about jobs that shared a device."""

from __future__ import annotations

import re
import runpy
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Final

import pytest

from hocket.core.timelines.idle import Cause
from hocket.sharing.board import Iteration
from hocket.sharing.forecast import Forecast
from hocket.sharing.picture import share_page, share_svg
from hocket.sharing.policy import Mode
from hocket.sharing.report import ShareReport
from hocket.sharing.simulate import SimulatedJob

PICTURES: Final = Path(__file__).parents[2] / "docs" / "images" / "make.py"


def played(budget_bytes: float = 2.0**22) -> ShareReport:
    """Two jobs half an iteration apart, played with a fake clock."""
    forecast = Forecast.of_changes(1.0, 2.0, [0.0, 0.5, 1.9], [2**20, 2**20, -(2**21)])
    jobs = [
        SimulatedJob(name, forecast, 9, believed=forecast, static_bytes=1000.0)
        for name in ("a", "<b>")
    ]
    report: ShareReport = runpy.run_path(str(PICTURES))["simulated_report"](
        Mode.LAG, jobs, budget_bytes
    )
    return report


@pytest.mark.parametrize("budget_bytes", [2.0**22, inf])
def test_shows_lanes_memory_delays_and_the_table(budget_bytes: float) -> None:
    """Each iteration has boxes for its waits, forward and backward, with a hint.

    Memory is stacked: the second job's layer begins where the first one's ends.
    """
    report = played(budget_bytes)
    svg = share_svg(report)
    layers = re.findall('<polygon points="([^"]*)"', svg)
    assert len(layers) == 2
    first, second = (set(layer.split()) for layer in layers)
    assert len(first & second) >= len(first) / 2
    boxes = svg.count("<rect") - 4 - 2  # less those of the legend and of the names
    assert boxes % 4 == 0
    assert boxes >= 4 * 8
    delays = re.findall(r'width="([0-9.]+)" fill="url\(#delay\)"', svg)
    assert len(delays) == boxes // 4
    assert svg.count("idle: another job: 0 s</title>") == boxes // 4
    assert ("budget 4 MiB" in svg) == (budget_bytes < inf)
    page = share_page(report)
    assert "&lt;b&gt;" in page
    assert "Mode lag: simulated." in page
    assert "2.00 times as fast as one alone" in page
    assert "<script" not in page


def test_the_picture_is_of_training() -> None:
    """Past bug: of recipes it showed the batches of the last evaluation alone."""
    report = played()
    last = [job.iterations[-1] for job in report.jobs]
    later = [
        replace(
            x, number=100 + i, kind="evaluation", start_s=x.end_s, end_s=x.end_s + 1
        )
        for i, x in enumerate(last)
    ]
    jobs = [
        replace(job, iterations=(*job.iterations, x), until_s=later[0].end_s)
        for job, x in zip(report.jobs, later, strict=True)
    ]
    svg = share_svg(replace(report, jobs=tuple(jobs)))
    assert "iteration 7, forward" in svg
    assert "iteration 10" not in svg


def test_a_page_without_an_iteration() -> None:
    """Past bug: where no iteration had ended there was no page, and an error."""
    report = played()
    jobs = tuple(replace(x, iterations=(), forecast=None) for x in report.jobs)
    assert "Jobs that share a device" in share_page(replace(report, jobs=jobs))


def test_the_report_counts_what_both_hold() -> None:
    """Half an iteration apart, the two blocks of one job meet the other's first."""
    report = played()
    assert report.peak_bytes == pytest.approx(2 * 1000 + 3 * 2**20, rel=0.01)
    assert report["a"].speed == pytest.approx(1.0)
    assert report.total_speed == pytest.approx(2.0)
    assert "together: 2.00 times" in str(report)


def test_a_job_waits_for_another_job_and_for_data() -> None:
    """Each iteration 1 s at a gate, and 0.5 s after the end of the one before."""
    job = played()["a"]
    own = [
        Iteration(i, 10.5 * i, 10.5 * i + 1, 0, 10.5 * i + 10, 1, True)
        for i in range(4)
    ]
    job = replace(job, iterations=tuple(own), first_shared=0, until_s=inf)
    assert job.idle_s == {Cause.JOB: 1.0, Cause.DATA: 0.5}
    head, row, *_ = str(replace(played(), jobs=(job,))).splitlines()[1:]
    assert re.search("idle: another job +idle: data", head)
    assert re.search("1 s +500 ms", row)
