"""For tests of recipes: they measure shortly."""

from __future__ import annotations

import pytest

from tests.run.short import measure_shortly


@pytest.fixture(autouse=True)
def _measure_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_shortly(monkeypatch)
