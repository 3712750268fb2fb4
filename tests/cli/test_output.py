"""Columns stand below each other."""

from __future__ import annotations

from hocket.cli.shared.output import aligned


def test_first_column_left_others_right() -> None:
    """Each as wide as its widest text."""
    rows = [("lane", "bubble", ""), ("d10", "9 %", "12 MiB")]
    assert aligned(rows) == ["lane  bubble        ", "d10      9 %  12 MiB"]
