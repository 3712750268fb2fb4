"""What all jobs of a process share, and a job must not change while others run.

    job a   run ────────────── changes a setting ─── run ─── check: a and b end
    job b       run ──────────────────────── check (good)  run ─── ...
    job c   (waits at its gate: goes on)

torch's settings, and the state of its default generators. Where several jobs run, it is
not known which one has changed them, or who has computed with the change: each job that
has run since the last check that found no change ends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch

from hocket.errors import ConfigError, HocketError, RunError
from hocket.run.device.generators import generator_lock
from hocket.sharing.running.random_state import JobRandom
from hocket.sharing.running.settings import Change, read_settings, set_settings

_TIMEOUT_S: Final = 600.0


class SharedState:
    """See above.

    Args:
        device: the jobs' device.
        generators: the device's default generators.
        randoms: the random state of each job, by its name.
    """

    def __init__(
        self,
        device: torch.device,
        generators: Sequence[torch.Generator],
        randoms: Mapping[str, JobRandom],
    ) -> None:
        self._generator_lock = generator_lock(device)
        self._generators = generators
        self._states = [x.get_state() for x in generators]
        self._settings = read_settings()
        self._randoms = randoms
        self._num_draws: dict[str, int] = {}  # at the last good check
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._suspects: set[str] = set()  # have run since the last good check
        self._unguarded: set[str] = set()
        self._errors: dict[str, HocketError] = {}

    def enter(self, job: str, *, is_unguarded: bool = False) -> None:
        """Mark that a job's code begins to run.

        Args:
            job: its name.
            is_unguarded: whether its draws would change the default generators.
        """
        with self._lock:
            self._running.add(job)
            self._suspects.add(job)
            if is_unguarded:
                self._unguarded.add(job)

    def leave(self, job: str) -> None:
        """Mark that a job waits, or has ended; what it has changed is not known yet."""
        with self._lock:
            self._running.discard(job)

    def check(self, job: str) -> None:
        """Mark that a job's code has run; what is changed is put back.

        Raises:
            ConfigError: it, or a job that has run beside it, has changed a setting.
            RunError: the same with random numbers.
        """
        with self._lock:
            self._running.discard(job)
            if job not in self._errors:
                self._look()
            if job in self._errors:
                raise self._errors[job]

    def restore_generators(self) -> None:
        """Put the generators' states back."""
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)

    def _look(self) -> None:
        """Look for changes, and let the jobs end that may have computed with them."""
        changes = set_settings(self._settings)
        for name in self._suspects if changes else ():
            error = _settings_error(name, self._suspects, changes)
            self._errors.setdefault(name, error)
        drawers = self._suspects & self._unguarded
        if drawers and self._is_drawn():
            for name in drawers | {x for x in self._suspects if self._draws(x)}:
                self._errors.setdefault(name, _draw_error(name, drawers))
        self._suspects = set(self._running)
        self._num_draws = {name: x.num_draws for name, x in self._randoms.items()}

    def _draws(self, job: str) -> bool:
        """Return whether a job has held the generators since the last good check.

        An unguarded draw at that moment was one of its numbers.
        """
        return self._randoms[job].num_draws > self._num_draws.get(job, 0)

    def _is_drawn(self) -> bool:
        """Return whether the generators' states have changed; put them back."""
        if not self._generator_lock.acquire(_TIMEOUT_S):
            return False
        try:
            now = [x.get_state() for x in self._generators]
            pairs = zip(now, self._states, strict=True)
            if all(torch.equal(a, b) for a, b in pairs):
                return False
            self.restore_generators()
            return True
        finally:
            self._generator_lock.release()


def _settings_error(
    name: str, suspects: Iterable[str], changes: Sequence[Change]
) -> ConfigError:
    return ConfigError(
        f"{_one_of(name, suspects)} changed {', and '.join(map(str, changes))}, which "
        "acts on all jobs; set it before hocket.share, for all of them, or use "
        "processes=True"
    )


def _draw_error(name: str, suspects: Iterable[str]) -> RunError:
    return RunError(
        f"{_one_of(name, suspects)} drew its first random numbers after iterations "
        "that had drawn none (or with draws=False): they are not those that it draws "
        "alone; give hocket.Job(..., draws=True)"
    )


def _one_of(name: str, suspects: Iterable[str]) -> str:
    """Name the job that has changed something, or those of which one has."""
    names = sorted(suspects)
    listed = ", ".join(map(repr, names))
    which = f"one of jobs {listed}" if len(names) > 1 else f"job {listed}"
    if names == [name]:
        return which
    return f"job {name!r} ends, as its results may be wrong: {which}"
