"""The GPU script for teachers runs whole on a CPU, and what is exact is exact there."""

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
    """Two workers over gloo; a frozen teacher, and delays 0 and 1."""
    path = tmp_path / "teacher.json"
    subprocess.run(
        [sys.executable, "-m", "bench.gpu.teacher", "--output", str(path)],
        check=True,
        cwd=ROOT,
        timeout=280,
    )
    found = json.loads(path.read_text())
    assert [row["delay"] for row in found["exactness"]] == [None, 0, 1]
    assert all(row["holds"] for row in found["exactness"])
    assert [row["delay"] for row in found["speed"]] == ["None", "0", "1"]
