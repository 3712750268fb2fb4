"""For the conformance suite: two workers are kept.

Layers are measured shortly. Of cases whose subject is not the model, those models that
are made of torch's modules alone are exported once in a process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from tests.conformance.cases import (
    CASES,
    inputs,
    loss_forms,
    losses,
    optimizer_groups,
    optimizers,
)
from tests.conformance.workers import ENTRY
from tests.run.support.exported_once import export_once
from tests.run.support.short_measurements import measure_shortly
from tests.run.support.worker_pool import WorkerPool

OF_ANY_MODEL: Final = {
    x.__name__ for x in (inputs, loss_forms, losses, optimizer_groups, optimizers)
}


@pytest.fixture(autouse=True)
def _shortly(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_shortly(monkeypatch)
    cell = getattr(request.node, "callspec", None)
    if cell is not None and CASES[cell.params["name"]].make.__module__ in OF_ANY_MODEL:
        export_once(monkeypatch)


@pytest.fixture(scope="session")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    """Started once for all cases, and again after one that failed."""
    pool = WorkerPool(ENTRY, 2, tmp_path_factory.mktemp("cases"), limit_s=30.0)
    yield pool
    pool.close()
