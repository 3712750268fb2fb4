"""The script for the first minutes on a GPU has no mistake: it runs on a CPU."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from bench.gpu.first import INSTALL_TIMEOUT_S, PARTS, install
from bench.gpu.part_process import end, start_python
from tests.run.support.forked_python import run_forked_python

TEN_MINUTES_S: Final = 600.0
# Their times mean nothing on a busy machine.
TIMED: Final = ("speed", "device")

STARTS_ANOTHER: Final = """
import subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(other.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.timeout(200)
def test_every_check_of_every_part_runs(tmp_path: Path) -> None:
    """None raises, what is exact holds, and a part that fails stops no other."""
    names = ["broken", *PARTS]
    module = ["-m", "tests.bench.support.forked_first"]
    options = ["--quick", "--parts", ",".join(names)]
    done = run_forked_python(
        [*module, tmp_path / "found", *options], tmp_path, timeout_s=190
    )
    found = json.loads((tmp_path / "found" / "first.json").read_text())
    assert list(found) == ["wheels", *names], done.stderr
    assert found["broken"]["exit_code"] != 0
    assert done.returncode != 0
    for name in PARTS:
        assert found[name]["exit_code"] == 0, (name, found[name], done.stderr)
        assert found[name]["checks"], name
        wrong = [row for row in found[name]["checks"] if not row["holds"]]
        if name in TIMED:
            wrong = [row for row in wrong if "error" in row]
        assert not wrong, name
    if not torch.cuda.is_available():
        skipped = [row for row in found["waits"]["checks"] if "skipped" in row]
        assert [row["check"] for row in skipped] == ["host_waits", "allocations"]


def test_all_parts_take_ten_minutes_at_most() -> None:
    """However many of them hang."""
    parts_s = sum(part.timeout_s for part in PARTS.values())
    assert INSTALL_TIMEOUT_S + parts_s <= TEN_MINUTES_S


def test_a_part_ends_with_all_that_it_started(tmp_path: Path) -> None:
    """A process that is left behind would keep its memory on the GPU."""
    output = tmp_path / "output"
    process = start_python(["-c", STARTS_ANOTHER], output)
    deadline_s = time.monotonic() + 20.0
    while not output.read_text().endswith("\n") and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert end(process, time.monotonic() + 0.1) is None
    other = Path("/proc") / output.read_text().strip() / "stat"
    while _runs(other) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not _runs(other)


def test_wheels_that_cannot_be_installed(tmp_path: Path) -> None:
    """The parts run without them, and the result says why."""
    assert install(tmp_path, tmp_path / "site") == {"installed": [], "holds": True}
    (tmp_path / "broken-1.0-py3-none-any.whl").write_bytes(b"no wheel")
    found: dict[str, Any] = install(tmp_path, tmp_path / "site")
    assert not found["holds"]
    assert "broken-1.0" in found["error"]
    assert str(tmp_path / "site") not in sys.path


def _runs(stat: Path) -> bool:
    """Whether a process is there, and no zombie that only waits to be read."""
    try:
        return stat.read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
