"""For tests of running: they measure shortly (but where that is the test), export once.

Models of one form are exported once in a process: see support/exported_once.py.
"""

from __future__ import annotations

import pytest

from tests.run.support.exported_once import export_once
from tests.run.support.short_measurements import measure_shortly


@pytest.fixture(autouse=True)
def _shortly(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    export_once(monkeypatch)
    if request.module.__name__.rpartition(".")[2] != "test_dry_run":
        measure_shortly(monkeypatch)
