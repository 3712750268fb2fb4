"""`hocket compare`: what differs between two runs, from their folders alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from hocket.cli.main import app


def shell(*arguments: str) -> Result:
    """What a call prints, and how it ends."""
    return CliRunner().invoke(app, ["compare", *arguments])


def run_folder(folder: Path, losses: list[float], rate: float, **idle: float) -> str:
    """A run's folder with a recipe and metrics."""
    folder.mkdir()
    recipe = f'[training]\nseed = 1\n[optimizer]\nkind = "sgd"\nlr = {rate}\n'
    (folder / "recipe.toml").write_text(recipe)
    lines: list[dict[str, Any]] = [
        {"kind": "step", "step": step, "loss": loss, "peak_bytes": 2**20}
        for step, loss in enumerate(losses)
    ]
    total = {"samples_per_s": 100.0, "measured_step_s": 0.25, "predicted_step_s": 0.2}
    lines.append({"kind": "summary", "loss": losses[-1], "idle_s": idle, **total})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    return str(folder)


def test_what_differs_is_named(tmp_path: Path) -> None:
    """The setting, the first step of other losses, and the causes of idle time."""
    first = run_folder(tmp_path / "a", [4.0, 2.0, 1.0], 0.1, messages=0.002)
    second = run_folder(tmp_path / "b", [4.0, 2.5, 1.0], 0.2, messages=0.003)
    done = shell(first, second)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]

    assert done.exit_code == 0, done.output
    assert "optimizer.lr 0.1 0.2" in lines
    assert not any(line.startswith("training.seed") for line in lines)
    assert "idle: messages 2 ms 3 ms +50.0 %" in lines
    assert "step, measured 250 ms 250 ms same" in lines
    assert lines[-1] == "losses part at step 1: 2.0 and 2.5, +0.5"


def test_equal_runs_are_equal(tmp_path: Path) -> None:
    """Bit for bit, and no setting differs."""
    first = run_folder(tmp_path / "a", [4.0, 2.0], 0.1)
    second = run_folder(tmp_path / "b", [4.0, 2.0], 0.1)
    done = shell(first, second)

    assert "losses are equal, bit for bit, in all 2 common steps" in done.stdout
    assert "none" in done.stdout


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    """It says which file is missing."""
    first = run_folder(tmp_path / "a", [1.0], 0.1)
    done = shell(first, str(tmp_path))
    assert done.exit_code
    assert "is no folder of a run: it has no recipe.toml" in done.output
