"""`hocket train --max-restarts`: a killed worker costs some steps, and nothing else."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from hocket.cli.main import app
from hocket.env import ExitCode
from hocket.run.checkpoint.format.newest import newest
from hocket.run.diagnostics.flight_recorder import read_flight_recorder
from tests.cli.shell import hocket
from tests.run.support.processes import eventually

RUN_TIMEOUT_S: Final = 300.0  # on a machine that has much else to do
START_S: Final = 200.0

SETTINGS: Final = (
    "model.width=16",
    "model.num_heads=2",
    "model.num_blocks=2",
    "model.mlp_width=16",
    "model.dropout=0.1",
    "training.max_steps=60",
    "training.evaluate_every_epochs=20",
    "pipeline.num_microbatches=2",
    "run.profile_folder=profiles",
    "checkpoint.every_steps=10",
)


def weights(run_dir: Path) -> dict[str, Tensor]:
    """What the newest checkpoint holds, which is the one at the end."""
    path = newest(run_dir / "checkpoints")
    assert path is not None
    state = {}
    for file in path.glob("weights-*.safetensors"):
        state.update(load_file(file))
    return state


def pid_of(run_dir: Path, rank: int) -> int:
    """The process of a worker that has begun."""
    [recorder] = run_dir.rglob(f"rank-{rank}.ring")
    found = read_flight_recorder(recorder)
    assert found is not None
    return found.pid


@pytest.mark.long
@pytest.mark.timeout(700)
@pytest.mark.parametrize("schedule", ["1f1b", "wpipe"])
def test_a_killed_worker_is_replaced(schedule: str, free_dir: Path) -> None:
    """The run ends with the weights of an undisturbed one, bit for bit.

    Also where several steps are in flight, and some weights are old.
    """
    settings = (*SETTINGS, f"pipeline.schedule={schedule}")
    arguments = [word for value in settings for word in ("--set", value)]

    def train(name: str, max_restarts: str) -> tuple[int, str]:
        done = hocket(
            *("train", "digits-vit", "--run-dir", name),
            *("--max-restarts", max_restarts, *arguments),
            cwd=free_dir,
            timeout_s=RUN_TIMEOUT_S,
            OMP_NUM_THREADS="1",
        )
        return done.returncode, done.stderr

    assert train("calm", "0") == (0, "")
    harmed = free_dir / "harmed"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(train, "harmed", "1")
        assert eventually(lambda: newest(harmed / "checkpoints") is not None, START_S)
        os.kill(pid_of(harmed, 1), signal.SIGKILL)
        code, reported = running.result()
    assert code == 0, reported
    assert "rank 1 was killed by signal 9 (SIGKILL) at step" in reported
    assert "starting the workers again, 1 of 1" in reported
    expected, found = weights(free_dir / "calm"), weights(harmed)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], x) for name, x in expected.items())


def test_torchrun_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker cannot start the others; it says who can."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(app, ["train", "digits-vit", "--max-restarts=2"])
    assert result.exit_code == ExitCode.USAGE
    assert "give it its own --max-restarts" in result.stderr
