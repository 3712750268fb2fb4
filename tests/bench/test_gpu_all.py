"""The script for ten minutes on a GPU runs on a CPU, and no failure stops it."""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest

from bench.gpu.all import PLAN, install
from bench.gpu.part_process import end, start_python
from bench.gpu.table import Line, kept
from tests.run.support.forked_python import run_forked_python

# What they measure means nothing on a busy machine.
TIMED: Final = (
    "device",
    "one worker, wide",
    "one worker, narrow",
    "one worker, resnet",
)

STARTS_ANOTHER: Final = """
import subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(other.pid, flush=True)
time.sleep(60)
"""


def run_all(folder: Path, *options: str, timeout_s: float) -> dict[str, Any]:
    """What the script writes, with forked processes; and its exit code and output."""
    module = ["-m", "tests.bench.support.forked_all", *options]
    path = folder / "found.json"
    done = run_forked_python(
        [*module, "--quick", "--at-once", "2", "--output", path],
        folder,
        timeout_s=timeout_s,
    )
    assert path.exists(), done.stderr
    found: dict[str, Any] = json.loads(path.read_text())
    return {**found, "exit_code": done.returncode, "printed": done.stdout}


def test_a_failure_costs_one_row(tmp_path: Path) -> None:
    """Parts that raise, die or hang are rows; a run goes on with what is missing."""
    first = run_all(tmp_path, "--fake", timeout_s=50.0)
    parts = first["parts"]
    assert parts["fine"]["holds"]
    assert parts["fine"]["card"]
    assert parts["hangs"]["error"] == "had not ended after 2 s"
    assert parts["dies"]["error"].startswith("exit code 3")
    assert "not mended yet" in parts["mended"]["error"]
    assert "it needs 1000000 s" in parts["late"]["not measured"]
    assert "not mended yet" in first["table"][0]["holds"]
    assert first["exit_code"] == 1
    assert "date" in first["environment"]

    earlier = tmp_path / "earlier.json"
    (tmp_path / "found.json").rename(earlier)
    (tmp_path / "mended").touch()
    options = ["--continue-from", str(earlier)]
    second = run_all(tmp_path, "--fake", *options, timeout_s=50.0)
    assert (tmp_path / "ran").read_text() == "fine\n"  # once
    assert second["parts"]["fine"] == parts["fine"]
    row = second["parts"]["mended"]["rows"]["mended"]
    assert (row["value"], row["fine"]) == (1.0, 2.0)
    assert second["parts"]["dies"]["error"].startswith("exit code 3")
    table = second["table"]
    assert [(x["seen"], x["holds"]) for x in table[:1]] == [("2.0", True)]
    assert table[1]["seen"] == "not measured"
    assert "it needs 1000000 s" in second["printed"]


def test_a_comparison_is_of_one_card() -> None:
    """Of a line with missing parts, none is kept that ran on another card."""

    def part(card: str, **more: Any) -> dict[str, Any]:
        return {"holds": True, "card": card, "rows": {"a": more}}

    lines = [
        Line("whole", "", "", ("a", "b"), lambda _: ("", True)),
        Line("in part", "", "", ("c", "d"), lambda _: ("", True)),
    ]
    parts = {name: part("H100") for name in "abc"}
    assert [*kept(parts, lines, "H200")] == ["a", "b"]
    assert [*kept(parts, lines, "H100")] == ["a", "b", "c"]
    skipped = part("CPU", skipped="needs a GPU")
    assert not kept({"e": skipped, "f": {**part("CPU"), "holds": False}}, [], "CPU")


def test_all_parts_are_there() -> None:
    """Each part's check is in its module, and each line's parts run."""
    parts = [x for group, _ in PLAN.together.values() for x in group] + [*PLAN.timed]
    for part in parts:
        checks = import_module(part.module).CHECKS
        assert part.check in checks if part.check else checks, part
    names = [part.name for part in parts]
    assert len({*names}) == len(names)
    assert {x for line in PLAN.lines for x in line.parts} <= {*names}


def check_parts(found: dict[str, Any], names: list[str]) -> None:
    """All have run, and hold where that is no matter of speed."""
    assert [*found["parts"]] == [x for x in found["parts"] if x in names]
    for name in names:
        part = found["parts"][name]
        wrong = [row for row in part["rows"].values() if not row["holds"]]
        if name in TIMED:
            wrong = [row for row in wrong if "error" in row]
        assert not wrong, (name, part)
        assert part["rows"], (name, part)


@pytest.mark.timeout(200)
def test_the_exact_parts_hold_on_a_cpu(tmp_path: Path) -> None:
    """Every check of them runs, and none raises."""
    options = ["--groups", "exact", "--seconds", "180", "--slow", "2"]
    found = run_all(tmp_path, *options, timeout_s=190.0)
    check_parts(found, [part.name for part in PLAN.together["exact"][0]])


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_whole_runs_on_a_cpu(tmp_path: Path) -> None:
    """Whole runs are exact, and all contestants are measured that need no GPU."""
    options = ["--groups", "started,timed", "--seconds", "1100", "--slow", "4"]
    found = run_all(tmp_path, *options, timeout_s=1150.0)
    started, timed = PLAN.together["started"][0], PLAN.timed
    check_parts(found, [part.name for part in [*started, *timed]])
    rows = found["parts"]["lstm, hocket"]["rows"]["lstm, hocket"]["orders"]
    assert {one["kernels"] for one in rows} == {"plain", "fused LSTM"}
    missing = [x for x in found["table"] if x["seen"] == "not measured"]
    assert all("needs a GPU" in x["holds"] for x in missing)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_exact_parts_hold_on_a_stand_in(tmp_path: Path) -> None:
    """Where tensors are not a CPU's, and ops run late: a process of its own."""
    process = start_python(
        ["-m", "tests.bench.support.stand_in_parts", str(tmp_path)],
        tmp_path / "output",
    )
    code = end(process, time.monotonic() + 380.0)
    assert code == 0, (tmp_path / "output").read_text()
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["check"] for row in rows if not row["holds"]] == [], rows
    assert len(rows) == 4


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
