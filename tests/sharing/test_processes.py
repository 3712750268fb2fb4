"""Jobs in processes of their own: each ends alone, and is exactly what it is alone.

Most of these processes are forked; that of the job whose starter is killed is a new
Python.
"""

from __future__ import annotations

import os
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import pytest
import torch

import hocket
from hocket.errors import ConfigError, FitError, RunError, WaitError
from hocket.sharing.forecast import Forecast
from hocket.sharing.policy import Mode, Point
from hocket.sharing.running.plan import SharePlan
from hocket.sharing.running.share import process_note
from tests.run.support.forked import answers_of
from tests.sharing.support.jobs import (
    Trained,
    classifier,
    gan,
    sleeping,
    train_alone,
)
from tests.sharing.support.process_jobs import ends_badly, with_offspring

JOBS: Final = "tests.sharing.support.process_jobs"
NUM: Final = 20
OTHERS: Final = ("turns", "lag", "tick-tock", "free", "auto")
MODES: Final = ["budget", *(pytest.param(x, marks=pytest.mark.long) for x in OTHERS)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", MODES)
def test_each_job_is_what_it_is_alone(mode: str, tmp_path: Path) -> None:
    """Losses and weights are bit-equal: random forwards, two optimizers, own seeds."""
    seeds = {"classifier": 3, "gan": 0}
    (found,) = answers_of(
        f"{JOBS}:share_saving",
        *(mode, str(tmp_path), NUM, seeds),
        num_workers=1,
        folder=tmp_path / "shared",
        whole_s=200.0,
    )
    trained = Trained()
    for make, (kind, seed) in zip((classifier, gan), seeds.items(), strict=True):
        losses = train_alone(make(kind, trained), NUM, seed)
        assert found[kind] == losses
        own = torch.load(tmp_path / f"{kind}.pt", weights_only=True)
        pairs = zip(own, trained.weights(kind), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.timeout(240)
def test_what_ends_one_process_ends_no_other(tmp_path: Path) -> None:
    """A signal, a crash, a hang that holds the interpreter, an error and an exit.

    All at once: the sixth job trains to its end, and each report has its own reason.
    """
    reasons = {
        "killed": (RunError, "SIGKILL in iteration 5"),
        "crash": (RunError, "SIGSEGV in iteration 5"),
        "hang": (WaitError, "iteration 5 took longer than timeout_s=1.5"),
        "error": (ZeroDivisionError, "its own fault"),
        "exit": (RunError, "exited with code 3 in iteration 5"),
    }
    (found,) = answers_of(
        f"{JOBS}:share_bad_ends",
        *([*reasons, "none"], 5),
        num_workers=1,
        folder=tmp_path,
    )
    jobs = found["jobs"]
    assert jobs["none"]["kind"] is None
    assert jobs["none"]["losses"] == [*map(float, range(12))]
    for how, (kind, text) in reasons.items():
        assert jobs[how]["kind"] == kind.__name__
        assert text in jobs[how]["text"]
        assert jobs[how]["losses"] == [*map(float, range(5))]
        assert f"ended by {kind.__name__}" in found["report"]
    assert jobs["hang"]["is_hung"]
    assert "in raise_error" in jobs["error"]["notes"]
    assert "SIGKILL" in found["raised"]


def _share(folder: str) -> None:
    """What the process does that is killed."""
    job = hocket.Job("a", partial(with_offspring, folder))
    hocket.share([job], mode="turns", device="cpu", processes=True)


def is_alive(number: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{number}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.timeout(120)
def test_no_process_outlives_the_one_that_started_it(tmp_path: Path) -> None:
    """It is killed, and says nothing: jobs and what they have started end with it."""
    starting = get_context("fork").Process(target=_share, args=(str(tmp_path),))
    starting.start()
    written = tmp_path / "numbers"
    until_s = time.monotonic() + 60
    while not written.exists():
        assert time.monotonic() < until_s
        time.sleep(0.05)
    numbers = [int(x) for x in written.read_text().split()]
    assert all(map(is_alive, numbers))
    starting.kill()
    starting.join()
    while any(map(is_alive, numbers)):
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_says_which_job_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function within a function, and arguments that are no plain values."""

    def inner(job: hocket.JobContext) -> Any:
        raise NotImplementedError

    function: Any = with_offspring
    wrong: list[tuple[Any, str]] = [
        (inner, r"job 'a' cannot run in a process of its own: workers cannot import"),
        (partial(function, torch.zeros(1)), "are not plain values; give a "),
        (partial(function, (1, 2)), "are not plain values"),
        (sleeping(0.1, 0.1, 1, 1), "top of a module or script"),
    ]
    for make, message in wrong:
        with pytest.raises(ConfigError, match=message):
            hocket.share([hocket.Job("a", make)], device="cpu", processes=True)
    monkeypatch.setenv("HOCKET_SHARED_JOB", "b")
    job = hocket.Job("a", partial(ends_badly, "none", 0))
    with pytest.raises(ConfigError, match="guard `if __name__"):
        hocket.share([job], device="cpu", processes=True)


def test_processes_on_a_gpu_need_all_peaks(tmp_path: Path) -> None:
    """Memory that one of them frees is of no use to another; MPS is seen."""
    for are_apart, is_refused in ((True, True), (False, False)):
        plan = SharePlan(Mode.BUDGET, 150.0, are_apart=are_apart)
        for name in "ab":
            plan.gate.join(name, 1.0, 2.0, 60.0)
            for _ in range(4):
                plan.board.wait(name, Point.WAITS, 0.0)
                plan.board.open_gates(0.0)
                plan.board.finish(name, 1.0)
            held = Forecast.of_changes(1.0, 1.0, [0.0, 1.5], [100.0, -100.0])
            plan.board.observe(name, held, 10.0)
        plan.after_iteration()
        assert isinstance(plan.gate.stop_error, FitError) == is_refused
        if is_refused:
            assert "give at least memory_bytes=65,757" in str(plan.gate.stop_error)
    assert "slices of time" in process_note(tmp_path)
    os.mkfifo(tmp_path / "control")
    assert "through MPS" in process_note(tmp_path)
