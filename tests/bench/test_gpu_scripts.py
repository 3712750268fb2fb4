"""GPU scripts run whole on a CPU, and what is exact is exact there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def results_of(name: str, folder: Path) -> dict[str, Any]:
    """What `bench.gpu.NAME` writes, on two workers over gloo."""
    path = folder / f"{name}.json"
    subprocess.run(
        [sys.executable, "-m", f"bench.gpu.{name}", "--output", str(path)],
        check=True,
        cwd=ROOT,
        timeout=280,
    )
    found: dict[str, Any] = json.loads(path.read_text())
    assert all(row["holds"] for row in found["exactness"])
    return found


@pytest.mark.long
@pytest.mark.timeout(300)
def test_freezing(tmp_path: Path) -> None:
    """Two workers keep their shape or become replicas."""
    found = results_of("freezing", tmp_path)
    assert [row["layouts"][-1] for row in found["exactness"]] == ["2x1", "1x2"]
    assert len(found["speed"]) == 3


@pytest.mark.long
@pytest.mark.timeout(300)
def test_share(tmp_path: Path) -> None:
    """A pair of jobs, one job in two waves, and a pipeline with a fill: all exact."""
    path = tmp_path / "share.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "bench.gpu.share", "--pairs", "1"),
            *("--seconds", "0.05", "--output", str(path)),
        ],
        check=True,
        cwd=ROOT,
        timeout=280,
    )
    rows = json.loads(path.read_text())["rows"]
    assert all(row["exact"] for row in rows)
    assert [row["contestant"] for row in rows] == [
        *("turns", "free", "tick-tock", "auto", "two processes"),
        *("waves: plain", "waves: exact", "waves: wave", "fill"),
    ]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_teacher(tmp_path: Path) -> None:
    """A frozen teacher, and momentum teachers of delay 0 and 1; then in two lanes."""
    found = results_of("teacher", tmp_path)
    assert [(row["delay"], row["own_lane"]) for row in found["exactness"]] == [
        (delay, lane) for lane in (False, True) for delay in (None, 0, 1)
    ]
    assert [(row["delay"], row["own_lane"]) for row in found["speed"]] == [
        *((delay, False) for delay in ("None", "0", "1")),
        *((delay, lane) for delay in ("None", "0", "1") for lane in (False, True)),
    ]
