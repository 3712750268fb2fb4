"""Processes that read data end with the worker that they read for, however it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.run.support.forked_python import start
from tests.run.support.processes import START_S, eventually

WITHIN_S: Final = 4.0  # on a busy machine; the bug took 5
WHAT: Final = "tests.run.support.loader_processes"

pytestmark = pytest.mark.timeout(120)


def numbers_of(folder: Path, kind: str) -> list[int]:
    """The processes of a kind, by the files that they left."""
    return [int(path.name.partition("-")[2]) for path in folder.glob(f"{kind}-*")]


def is_alive(number: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        text = Path(f"/proc/{number}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """No process outlives its test."""
    yield
    for number in filter(is_alive, numbers_of(tmp_path, "*")):
        os.kill(number, signal.SIGKILL)


@pytest.mark.parametrize(
    ("killed", "num_workers", "ended"),
    [
        ("launcher", 2, ("worker", "ours", "torch", "slow")),
        ("worker", 2, ("worker", "ours", "torch", "slow")),
        # The test started this worker: torch's loaders end within 5 s of its last read.
        ("worker", 0, ("worker", "ours")),
    ],
)
def test_a_kill_ends_all_that_read(
    tmp_path: Path, killed: str, num_workers: int, ended: tuple[str, ...]
) -> None:
    """After SIGKILL of the launcher they read on: for 5 s, or as long as it took."""
    launcher = start(["-m", WHAT, tmp_path, str(num_workers)], tmp_path)
    count = max(1, num_workers)
    assert eventually(lambda: len(numbers_of(tmp_path, "worker")) == count, START_S)
    kinds = {kind: numbers_of(tmp_path, kind) for kind in ended}
    assert {len(numbers) for numbers in kinds.values()} == {count}
    victim = launcher.pid if killed == "launcher" else kinds["worker"][0]
    os.kill(victim, signal.SIGKILL)
    left = [number for numbers in kinds.values() for number in numbers]
    assert eventually(lambda: not any(map(is_alive, left)), WITHIN_S), [
        kind for kind in kinds if any(map(is_alive, kinds[kind]))
    ]
    launcher.kill()
    launcher.wait()
