"""For tests of commands: models of one form are exported once in a process."""

from __future__ import annotations

import pytest

from tests.run.support.exported_once import export_once


@pytest.fixture(autouse=True)
def _exported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    export_once(monkeypatch)


@pytest.fixture(autouse=True)
def _any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as they are, unless a test says how wide the terminal is."""
    monkeypatch.delenv("COLUMNS", raising=False)
