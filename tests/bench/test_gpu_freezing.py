"""The GPU script for freezing runs whole on a CPU, and what is exact is exact there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_checks_and_measures_on_a_cpu(tmp_path: Path) -> None:
    """Two workers over gloo, which keep their shape or become replicas."""
    path = tmp_path / "freezing.json"
    subprocess.run(
        [sys.executable, "-m", "bench.gpu.freezing", "--output", str(path)],
        check=True,
        cwd=ROOT,
        timeout=280,
    )
    found = json.loads(path.read_text())
    assert [row["layouts"][-1] for row in found["exactness"]] == ["2x1", "1x2"]
    assert all(row["holds"] for row in found["exactness"])
    assert len(found["speed"]) == 3
