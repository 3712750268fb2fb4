"""The line that says how far a long command has come."""

from __future__ import annotations

import sys
from io import StringIO

import pytest

from hocket.cli import plan
from hocket.cli.plan import StatusLine


class Terminal(StringIO):
    """A terminal's standard error."""

    def isatty(self) -> bool:
        """It is one."""
        return True


def test_says_what_is_done_before_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first moment on, here; and leaves nothing behind."""
    monkeypatch.setattr(plan, "_AFTER_S", 0.0)
    monkeypatch.setattr(plan, "_EVERY_S", 0.0)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with StatusLine("planning", "candidates", "measuring") as status:
        status._begin.join()
        assert terminal.getvalue().endswith("planning: measuring")
        status(3, 1200)
        assert terminal.getvalue().endswith("planning: 3 of 1,200 candidates")
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_files_stay_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A status line writes nothing to a file, which is no terminal."""
    monkeypatch.setattr(plan, "_AFTER_S", 0.0)
    file = StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    with StatusLine("planning", "candidates", "measuring") as status:
        status._begin.join()
        status(3, 1200)
    assert not file.getvalue()
