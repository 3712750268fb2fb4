"""Jobs that a process of its own imports: by name, with plain arguments."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import torch

import hocket
from hocket import JobContext
from hocket.errors import RunError
from tests.run.support.forked_python import fork_instead_of_popen
from tests.sharing.support.jobs import Trained, classifier, gan, sleeping

KINDS: Final = {"classifier": classifier, "gan": gan}
_POPEN: Final = "hocket.sharing.running.processes.job_process.Popen"


def share_saving(mode: str, folder: str, num: int, seeds: dict[str, int]) -> Any:
    """Share among jobs that write their weights; the losses of each.

    Args:
        mode: how they share.
        folder: of the weights.
        num: the iterations of each.
        seeds: of each job, by its kind.
    """
    jobs = [
        hocket.Job(kind, partial(saving, kind, folder, num), seed=seed)
        for kind, seed in seeds.items()
    ]
    with fork_instead_of_popen(_POPEN):
        report = hocket.share(
            jobs, mode=mode, num_iterations=num, device="cpu", processes=True
        )
    report.check()
    assert all(job.forecast is not None for job in report.jobs)
    return {job.name: job.losses for job in report.jobs}


def share_bad_ends(ways: list[str], at: int) -> Any:
    """Share among jobs that end in some ways in an iteration; what is reported.

    Of each job: the kind, text and notes of its error, whether it is hung, its losses.
    """
    jobs = [
        hocket.Job(
            how, partial(ends_badly, how, at), timeout_s=1.5 if how == "hang" else 60.0
        )
        for how in ways
    ]
    with fork_instead_of_popen(_POPEN):
        report = hocket.share(jobs, mode="turns", device="cpu", processes=True)
    found: dict[str, Any] = {"report": str(report)}
    try:
        report.check()
    except RunError as error:
        found["raised"] = str(error)
    found["jobs"] = {
        job.name: {
            "kind": None if job.error is None else type(job.error).__name__,
            "text": str(job.error),
            "notes": str(getattr(job.error, "__notes__", ())),
            "is_hung": job.is_hung,
            "losses": job.losses,
        }
        for job in report.jobs
    }
    return found


def saving(kind: str, folder: str, num_iterations: int, job: JobContext) -> Any:
    """A job that writes its weights after its last iteration."""
    trained = Trained()
    step, batches = KINDS[kind]("model", trained)(job)
    done = 0

    def saving_step(batch: Any) -> Any:
        nonlocal done
        loss = step(batch)
        done += 1
        if done == num_iterations:
            torch.save(trained.weights("model"), Path(folder) / f"{job.name}.pt")
        return loss

    return saving_step, batches


def ends_badly(how: str, at: int, job: JobContext) -> Any:
    """A job that is killed, crashes, hangs, raises or exits in an iteration."""

    def step(batch: int) -> float:
        with job.forward():
            if batch == at:
                ways[how]()  # type: ignore[no-untyped-call]
        with job.backward():
            return float(batch)

    def hold_interpreter() -> None:
        sleep: Any = ctypes.PyDLL(None).sleep
        sleep(120)

    def raise_error() -> None:
        raise ZeroDivisionError("its own fault")

    ways = {
        "none": lambda: None,
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "crash": lambda: ctypes.string_at(0),
        "hang": hold_interpreter,
        "error": raise_error,
        "exit": lambda: os._exit(3),
    }
    return step, range(12)


def with_offspring(folder: str, job: JobContext) -> Any:
    """A job that starts a process, writes both numbers down, and trains for ever."""
    forked: Any = get_context("fork")
    child = forked.Process(target=time.sleep, args=(300,))
    child.start()
    step, _ = sleeping(0.01, 0.01, 1024, 1)(job)
    path = Path(folder) / "numbers"
    path.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
    path.with_suffix(".new").rename(path)
    return step, iter(int, 1)
