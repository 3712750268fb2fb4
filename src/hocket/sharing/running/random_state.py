"""Random numbers of each job, as if it were alone.

torch has one default generator for each device, for all threads. A job's draws hold it:

    job a   ... dropout ...            lock, put a's state, draw, keep a's state, unlock
    job b         ... randn ...                 waits for the lock, the same with b's

Draws are operators with `torch.Tag.nondeterministic_seeded`; and what reads or seeds
the generator itself (`torch.manual_seed`, activation checkpointing) goes through a
proxy that finds the job by its thread. Mode `turns` needs neither: it sets the
job's state when a turn begins, and saves it when the turn ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from hocket import cuda
from hocket.errors import RunError, WaitError
from hocket.model.trace.observe import is_random
from hocket.run.device.generators import generator_lock
from hocket.run.device.operator_mode import OperatorMode

_PROXIED: Final = ("get_state", "set_state", "manual_seed", "seed", "initial_seed")
_TIMEOUT_S: Final = 600.0


def default_generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """Return the default generators that work on a device draws from."""
    if device.type == "cuda":
        return torch.default_generator, cuda.generator(device)
    return (torch.default_generator,)


class JobRandom:
    """The random state of one job.

    Args:
        device: the job's device.
        generators: the device's default generators.
        seed: the seed of its state at first.
    """

    def __init__(
        self, device: torch.device, generators: Sequence[torch.Generator], seed: int
    ) -> None:
        self._lock = generator_lock(device)
        self._generators = generators
        self._is_held = False
        self._num_draws = 0
        made = [torch.Generator(x.device).manual_seed(seed) for x in generators]
        self._states = [x.get_state() for x in made]

    @property
    def has_drawn(self) -> bool:
        """Return whether the job has held the generators, other than for a turn."""
        return self._num_draws > 0

    def set_state(self) -> None:
        """Let the device's generators continue this job's numbers."""
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)

    def save_state(self) -> None:
        """Keep the generators' states as this job's."""
        self._states = [generator.get_state() for generator in self._generators]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Draw this job's numbers in the block; others wait, and see no change.

        Raises:
            WaitError: another job holds the generators for ten minutes.
        """
        if self._is_held:
            yield
            return
        if not self._lock.acquire(_TIMEOUT_S):
            raise WaitError(
                f"waited {_TIMEOUT_S:.0f} s for torch's default generator, which "
                "another job holds"
            )
        before = [generator.get_state() for generator in self._generators]
        self._is_held = True
        self._num_draws += 1
        self.set_state()
        try:
            yield
        finally:
            self.save_state()
            for generator, state in zip(self._generators, before, strict=True):
                generator.set_state(state)
            self._is_held = False
            self._lock.release()


class DrawGuard(OperatorMode):
    """Lets operators that draw hold the generators for their job."""

    def __init__(self, random: JobRandom) -> None:
        super().__init__()
        self._random = random

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call the operator."""
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None or not is_random(func, args, kwargs):
            return func(*args, **kwargs)
        with self._random.held():
            return func(*args, **kwargs)


class UnguardedDrawCheck:
    """Detects random draws made outside `DrawGuard`.

    While no job holds the generators, their states never change.

    Args:
        device: the jobs' device.
        generators: the device's default generators.
    """

    def __init__(
        self, device: torch.device, generators: Sequence[torch.Generator]
    ) -> None:
        self._lock = generator_lock(device)
        self._generators = generators
        self._states: list[Tensor] = [x.get_state() for x in generators]

    def check(self, job: str) -> None:
        """Look whether the states are the same.

        Raises:
            RunError: one has changed.
        """
        if not self._lock.acquire(_TIMEOUT_S):
            return
        try:
            now = [x.get_state() for x in self._generators]
            pairs = zip(now, self._states, strict=True)
            if all(torch.equal(a, b) for a, b in pairs):
                return
            self.restore()
        finally:
            self._lock.release()
        raise RunError(
            f"job {job!r}, or one that ran beside it, drew its first random numbers "
            "after iterations that had drawn none: they are not those that it draws "
            "alone; give hocket.Job(..., draws=True)"
        )

    def restore(self) -> None:
        """Put the states back."""
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)


class _Proxy:
    """A default generator that each job's thread sees in its own state."""

    def __init__(
        self, real: torch.Generator, find: Callable[[], JobRandom | None]
    ) -> None:
        self._real = real
        self._find = find

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._real, name)
        random = self._find()
        if name not in _PROXIED or random is None:
            return method

        def call(*args: Any) -> Any:
            with random.held():
                return method(*args)

        return call


@contextmanager
def generators_by_thread(
    device: torch.device, jobs: dict[int, JobRandom]
) -> Iterator[None]:
    """Let `torch.get_rng_state` and its like act on the state of the caller's job.

    Args:
        device: the jobs' device.
        jobs: the random state of each job, by its thread's identifier; may grow.
    """

    def find() -> JobRandom | None:
        return jobs.get(threading.get_ident())

    real = torch.default_generator
    proxy: Any = _Proxy(real, find)
    homes = (torch, torch.random)
    for home in homes:
        vars(home)["default_generator"] = proxy
    put_back = None
    if device.type == "cuda":
        put_back = cuda.replace_generator(device, lambda own: _Proxy(own, find))
    try:
        yield
    finally:
        for home in homes:
            vars(home)["default_generator"] = real
        if put_back is not None:
            put_back()
