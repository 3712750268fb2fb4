"""Where no candidate can be tried, the plan says what its schedules need."""

from __future__ import annotations

from typing import Any

import pytest

from hocket.errors import PlanError
from hocket.planner.rank import Search, rank
from tests.planner.toys import cluster, work


@pytest.mark.parametrize(
    ("schedule", "least"), [("pipedream-2bw", 4), ("wpipe", 4), ("wpipe-overlapped", 6)]
)
def test_the_number_that_works_is_reported_and_works(schedule: str, least: int) -> None:
    """Flush-free orders that were asked for with too few microbatches."""
    asked: dict[str, Any] = {
        "schedules": (schedule,),
        "num_devices": (4,),
        "data_parallel": False,
        "max_delay": 1,
    }
    with pytest.raises(PlanError) as raised:
        rank(work(8), cluster(4), 24, Search(**asked, num_microbatches=(least - 1,)))
    expected = (
        f"nothing can be tried for 24 samples on 4 devices: {schedule} on 4 devices "
        f"needs {least} microbatches a step or more, got {least - 1}: use {least}"
    )
    assert expected in str(raised.value)
    ranking = rank(work(8), cluster(4), 24, Search(**asked, num_microbatches=(least,)))
    assert ranking.best is not None
    assert ranking.best.candidate.schedule == schedule


def test_otherwise_the_batch_is_too_small() -> None:
    """Where no schedule was even asked."""
    asked = Search(("1f1b",), num_microbatches=(64,), data_parallel=False)
    with pytest.raises(PlanError, match="use a larger batch, or other microbatches"):
        rank(work(8), cluster(4), 16, asked)
