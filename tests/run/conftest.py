"""For tests of running: they measure shortly, but where measuring is what they test."""

from __future__ import annotations

import pytest

from tests.run.support.short_measurements import measure_shortly


@pytest.fixture(autouse=True)
def _measure_shortly(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.module.__name__.rpartition(".")[2] != "test_dry_run":
        measure_shortly(monkeypatch)
