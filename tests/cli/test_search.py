"""`hocket search`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hocket.cli.main import app
from hocket.core.check import check
from hocket.core.schedule import Schedule

pytest.importorskip("ortools")

SIZES = ("1f1b", "-d", "3", "-m", "5")


def run(*arguments: str, exit_code: int = 0) -> tuple[str, str]:
    """What `hocket search` prints, and what it says beside."""
    done = CliRunner().invoke(app, ["search", *arguments, "--time-limit", "20"])
    assert done.exit_code == exit_code, done.output
    return done.stdout, done.stderr


def test_says_how_far_a_schedule_is_from_the_best() -> None:
    """1F1B takes 21 s where 17 s are the least; the order stands below."""
    out, reported = run(*SIZES)
    words = [" ".join(line.split()) for line in out.splitlines()]

    assert "1f1b 21 s 23.5 % 28.6 % 3" in words
    assert any(line.startswith("found 17 s 0 %") for line in words)
    assert "bound 17 s" in words
    assert "Proved: none is faster than the one found." in words
    check(Schedule.parse(out[out.index("d0") :]))
    assert "bound 17 s" in reported


def test_the_order_is_written_like_any_other(tmp_path: Path) -> None:
    """As text, under a limit of three microbatches; `simulate` reads it."""
    path = tmp_path / "best.txt"
    limit = ("--activation-bytes", "1", "--memory-bytes", "3")
    out, _ = run(*SIZES, *limit, "--out", str(path), "--json")
    numbers = json.loads(out)
    done = CliRunner().invoke(app, ["simulate", str(path), "--json"])

    assert numbers["found"]["is_optimal"]
    assert numbers["found"]["peak_activations"] <= 3
    assert numbers["found"]["peak_microbatches"] >= numbers["found"]["peak_activations"]
    assert numbers["found"]["peak_bytes"] <= 3
    assert json.loads(done.stdout)["makespan_s"] == numbers["found"]["makespan_s"]
    assert numbers["given"]["gap"] >= numbers["found"]["gap"] == 0.0
    assert str(Schedule.parse(numbers["order"])) == path.read_text().rstrip("\n")


def test_whole_backwards_stay_whole() -> None:
    """Then 1F1B is the best there is."""
    out, _ = run(*SIZES, "--whole", "--json")
    numbers = json.loads(out)

    assert numbers["given"]["gap"] == 0.0
    assert "W" not in numbers["order"]


def test_too_little_memory_is_refused_with_what_would_do() -> None:
    """Two stages on each device: no microbatch fits into one unit."""
    limit = ("--activation-bytes", "4", "--memory-bytes", "3")
    _, reported = run(*SIZES, *limit, exit_code=3)

    assert "needs 4 bytes" in reported


def test_without_ortools_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one line, without a traceback."""
    for name in ("ortools", "ortools.sat.python", "ortools.sat.python.cp_model"):
        monkeypatch.setitem(sys.modules, name, None)
    done = CliRunner().invoke(app, ["search", *SIZES])

    assert done.exit_code != 0
    assert "pip install 'hocket[search]'" in done.stderr
