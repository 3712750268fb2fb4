"""Parts of a benchmark that are not measured again keep their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.share import run


def test_parts_that_are_measured_replace_their_own_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others stay, in the order of all parts."""
    path = tmp_path / "cpu.json"
    made: dict[str, Any] = {name: lambda _: iter([{"is": "old"}]) for name in run.PARTS}
    monkeypatch.setattr(run, "PART", made)
    monkeypatch.setattr("sys.argv", ["run", "--output", str(path)])
    run.main()
    made["gate"] = lambda _: iter([{"is": "new"}, {"is": "newer"}])
    monkeypatch.setattr("sys.argv", ["run", "--parts", "gate", "--output", str(path)])
    run.main()
    rows = json.loads(path.read_text())["rows"]
    assert [(row["part"], row["is"]) for row in rows] == [
        ("turns", "old"),
        ("gate", "new"),
        ("gate", "newer"),
        ("forecast", "old"),
        ("merged", "old"),
    ]
