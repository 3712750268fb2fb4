"""The GPU script for compiled steps runs on a CPU, and what is exact is exact there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NETS = "transformer", "lstm"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_checks_and_measures_on_a_cpu(tmp_path: Path) -> None:
    """Two of its five networks, on one lane and on two."""
    path = tmp_path / "single.json"
    command = [sys.executable, "-m", "bench.gpu.ooo_single", "--nets", ",".join(NETS)]
    subprocess.run([*command, "--output", str(path)], check=True, cwd=ROOT, timeout=580)
    found = json.loads(path.read_text())
    assert found["exactness"]["holds"]
    for name in NETS:
        assert set(found[name]["step"]) == {
            "eager",
            "hocket, lanes: 1",
            "hocket, lanes: 2",
        }
        assert not found[name]["failed"]
