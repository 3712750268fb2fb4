"""Jobs that a process of its own imports: by name, with plain arguments."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import torch

from hocket import JobContext
from tests.sharing.support.jobs import Trained, classifier, gan, sleeping

KINDS: Final = {"classifier": classifier, "gan": gan}


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
