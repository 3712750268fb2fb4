"""A job as users write it, and what its code is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import inf
from numbers import Real
from pathlib import Path
from typing import Any, TypeAlias

import torch

from hocket.errors import ConfigError, NoMemoryError

Step: TypeAlias = Callable[[Any], Any]


class JobContext(ABC):
    """What a job's code marks its iterations with.

    Attributes:
        name: the job's name.
        device: the device to compute on.
        kind: what kind of iteration this is, if `step` says so: `step` may set it at
            any time. What iterations take is compared within a kind.
    """

    name: str
    device: torch.device
    kind: str = ""

    @abstractmethod
    def forward(self) -> AbstractContextManager[None]:
        """Mark a forward: what is computed in the block allocates activations."""

    @abstractmethod
    def backward(self) -> AbstractContextManager[None]:
        """Mark a backward: what is computed in the block releases them."""


MakeJob: TypeAlias = Callable[[JobContext], tuple[Step, Iterable[Any]]]


@dataclass(frozen=True, slots=True)
class Job:
    """A training job that shares its device.

    Args:
        name: names it in reports.
        make: makes the model and all else, given a `JobContext`; returns `step(batch)`,
            which trains one iteration and may return its loss, and the batches. Within
            `step`, `with job.forward():` and `with job.backward():` mark where it is.
        weight: its share of the device's time, relative to the other jobs'; in modes
            `turns`, `budget` and `auto`.
        memory_bytes: the most that this job may hold; None for no limit of its own.
        max_slowdown: how much longer its iterations may take than alone, without the
            time in which it loads data (with it in `turns`, where data is loaded within
            the turn); in all modes but `tick-tock` and `free`.
        seed: what torch's default generators are seeded with before `make`; each job
            draws its own numbers, as if it were alone.
        draws: whether it draws random numbers from torch's default generators; None if
            the first iterations show it.
        timeout_s: after which an iteration counts as hung; then the other jobs go on.
        folder: where it saves checkpoints, if it does; no two jobs may have the same.

    Raises:
        ConfigError: a value makes no sense.
    """

    name: str
    make: MakeJob
    weight: float = 1.0
    memory_bytes: int | None = None
    max_slowdown: float = inf
    seed: int = 0
    draws: bool | None = None
    timeout_s: float = 600.0
    folder: str | Path | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("weight", "max_slowdown", "timeout_s", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Real):
                raise ConfigError(
                    f"job {self.name!r}: {name}={value!r} is no number, as it must be"
                )
        if not 0 < self.weight < inf:
            raise ConfigError(
                f"job {self.name!r}: weight={self.weight} gives it or the others no "
                "time at all; weights are shares of the device's time: finite numbers "
                "above 0"
            )
        if not self.max_slowdown >= 1:
            raise ConfigError(
                f"job {self.name!r}: max_slowdown={self.max_slowdown} would be faster "
                "than alone; give at least 1"
            )
        for name in ("timeout_s", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"job {self.name!r}: {name}={value} is not above 0")


def no_memory(text: str, actual_bytes: int) -> NoMemoryError:
    """Return the error of a job that holds too much, or finds no memory."""
    return NoMemoryError(
        text, stage=None, predicted_bytes=None, actual_bytes=actual_bytes
    )


def made_parts(name: str, made: object) -> tuple[Step, Iterable[Any]]:
    """Return the step and the batches that a job's `make` has returned.

    Raises:
        ConfigError: it has returned anything else.
    """
    match made:
        case (step, batches) if callable(step) and isinstance(batches, Iterable):
            return step, batches
    raise ConfigError(
        f"job {name!r}: make returned {type(made).__name__} and not step, batches: "
        "return a function step(batch), which trains one iteration, and an iterable of "
        "batches"
    )


def check_jobs(jobs: list[Job]) -> None:
    """Refuse jobs that cannot share.

    Raises:
        ConfigError: there are none, or two have one name or one checkpoint folder.
    """
    if not jobs:
        raise ConfigError("there is no job to run; give at least one hocket.Job")
    names: set[str] = set()
    folders: dict[Path, str] = {}
    for job in jobs:
        if job.name in names:
            raise ConfigError(
                f"two jobs are named {job.name!r}; give each its own name"
            )
        names.add(job.name)
        if job.folder is None:
            continue
        folder = Path(job.folder).resolve()
        if folder in folders:
            raise ConfigError(
                f"jobs {folders[folder]!r} and {job.name!r} both save to {folder}; "
                "each would overwrite the other's checkpoints: give each its own folder"
            )
        folders[folder] = job.name
