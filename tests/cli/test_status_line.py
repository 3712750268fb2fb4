"""The line that says how far a long command has come."""

from __future__ import annotations

import sys
from io import StringIO

import pytest

from hocket.cli.plan import status_line
from tests.run.support.processes import eventually


class Terminal(StringIO):
    """A terminal's standard error."""

    def isatty(self) -> bool:
        """It is one."""
        return True


def test_says_what_is_done_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """First without a number; the last characters erase the line."""
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with status_line("measuring") as status:
        assert eventually(lambda: "planning: measuring" in terminal.getvalue(), 10.0)
        status(3, 1200)
        assert eventually(lambda: "3 of 1,200 candidates" in terminal.getvalue(), 10.0)
    assert terminal.getvalue().endswith("\x1b[2K")


def test_files_stay_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A status line writes nothing to a file, which is no terminal."""
    file = StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    with status_line("measuring") as status:
        status(3, 1200)
    assert not file.getvalue()
