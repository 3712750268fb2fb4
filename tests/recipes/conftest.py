"""For tests of recipes: they measure shortly, and export no model twice."""

from __future__ import annotations

import pytest

from tests.run.support.exported_once import export_once
from tests.run.support.short_measurements import measure_shortly


@pytest.fixture(autouse=True)
def _shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_shortly(monkeypatch)
    export_once(monkeypatch)
