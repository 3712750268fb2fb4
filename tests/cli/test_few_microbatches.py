"""Too few microbatches for an order that never flushes: the number that works is named.

With fewer, the weights that a step reads would not be there when it begins.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hocket.cli.main import app
from hocket.env import ExitCode

CASES = [("pipedream-2bw", 4, 4), ("wpipe", 4, 4), ("wpipe-overlapped", 4, 6)]


def shell(*arguments: str) -> tuple[int, str]:
    """How a call ends, and what it prints."""
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.output


def settings(schedule: str, p: int, m: int, **more: int) -> list[str]:
    """Of a recipe."""
    numbers = {"num_workers": p, "num_microbatches": m, **more}
    values = [f"pipeline.{name}={number}" for name, number in numbers.items()]
    values.append(f"pipeline.schedule={schedule}")
    return [word for value in values for word in ("--set", value)]


@pytest.mark.parametrize(("schedule", "p", "least"), CASES)
@pytest.mark.parametrize("command", ["draw", "simulate", "check"])
def test_of_a_schedule_by_name(command: str, schedule: str, p: int, least: int) -> None:
    """Exit code 3, one sentence; with the number that it names, there is an order."""
    code, output = shell(command, schedule, "-d", str(p), "-m", str(least - 1))
    assert code == ExitCode.PLAN
    assert output.startswith(f"hocket: {schedule} on {p} devices needs {least} ")
    assert f"got {least - 1}" in output
    found = re.search(r"use (\d+), or fewer devices", output)
    assert found is not None
    code, output = shell(command, schedule, "-d", str(p), "-m", found[1])
    assert code == ExitCode.OK, output


@pytest.mark.parametrize(("schedule", "p", "least"), CASES)
def test_of_a_recipe(schedule: str, p: int, least: int, free_dir: Path) -> None:
    """Exit code 2, with the key, before any worker starts; for each replica."""
    for num_replicas in (1, 2):
        code, output = shell(
            "train",
            "digits-vit",
            *settings(schedule, p * num_replicas, least - 1, num_replicas=num_replicas),
        )
        assert code == ExitCode.USAGE
        assert f"pipeline.schedule: {schedule} on {p} devices" in output
        assert f"use {least}, or fewer devices" in output
    assert not list(free_dir.iterdir())


def test_one_microbatch_a_step() -> None:
    """PipeDream is the other way round: it updates after each."""
    code, output = shell("draw", "pipedream", "-d", "4", "-m", "4")
    assert code == ExitCode.PLAN
    assert "got num_microbatches=4: use 1, or pipedream-2bw" in output
