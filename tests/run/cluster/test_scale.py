"""What a worker opens and sends does not grow with workers that it does not talk to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.scale.workers import DEPTH
from tests.run.support.forked import CALM_TIMEOUT_S, run_forked

COUNT = "tests.run.support.counted_workers:count"

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def counted(folder: Path, num_workers: int) -> list[dict[str, Any]]:
    """What each worker of a job has counted, by rank."""
    own = folder / str(num_workers)
    own.mkdir()
    done = run_forked(
        COUNT,
        num_workers // DEPTH,
        num_workers=num_workers,
        folder=own,
        timeout_s=CALM_TIMEOUT_S,
    )
    assert not done.reports, done.reports
    return [done.results[rank] for rank in range(num_workers)]


def test_a_second_replica_asks_for_no_more(tmp_path: Path) -> None:
    """Every worker read every other's part of each exchange: 212 requests, then 338.

    The second replica's workers talk to no more than the first one's, when that was
    alone, but for their copies: in one more group. No step asks the store for anything.
    """
    four, eight = counted(tmp_path, 4), counted(tmp_path, 8)

    def most(name: str, rows: list[dict[str, Any]]) -> float:
        return max(float(row[name]) for row in rows)

    assert most("requests", eight[DEPTH:]) <= most("requests", four[1:]) + 10
    assert most("messages", eight[DEPTH:]) <= most("messages", four)
    assert most("groups", eight) == 2 * most("groups", four) == 2
    for row in four + eight:
        assert row["requests_of_a_step"] == 0
