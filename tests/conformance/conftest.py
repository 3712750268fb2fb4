"""For the conformance suite: layers are measured shortly, and two workers are kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.workers import ENTRY
from tests.run.support.short_measurements import measure_shortly
from tests.run.support.worker_pool import WorkerPool


@pytest.fixture(autouse=True)
def _shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_shortly(monkeypatch)


@pytest.fixture(scope="session")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    """Started once for all cases, and again after one that failed."""
    pool = WorkerPool(ENTRY, 2, tmp_path_factory.mktemp("cases"), limit_s=30.0)
    yield pool
    pool.close()
