"""What all jobs of a process share, and a job must not change while others run.

    job a   run ────────────── changes a setting ─── run ─── check: a and b end
    job b       run ──────────────────────── check (good)  run ─── ...
    job c   (waits at its gate: goes on)

torch's settings, and the state of its default generators. Where several jobs run, it is
not known which one has changed them, or which ones have computed with the change: a
check that finds a change ends each job that has run since the check before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, TypeAlias

import torch

from hocket.errors import ConfigError, HocketError, RunError
from hocket.run.device.generators import generator_lock
from hocket.sharing.running.gate import StoppedError
from hocket.sharing.running.random_state import JobRandom

# Settings of torch that all jobs of a process share, and a job must not change.
Settings: TypeAlias = tuple[Any, ...]

_MIXED: Final = "set by fp32_precision"  # torch refuses to read it then


@dataclass(frozen=True, slots=True)
class _Setting:
    """One setting: an attribute of torch's, or a function that sets one.

    Args:
        name: what a job's code calls or sets, in torch.
        reader: the function that reads what a function sets.
    """

    name: str
    reader: str = ""

    def read(self) -> Any:
        """Return its value."""
        try:
            found = attrgetter(self.reader or self.name)(torch)
            return found() if self.reader else found
        except RuntimeError:
            return _MIXED

    def put(self, value: Any) -> None:
        """Set it."""
        if self.reader:
            attrgetter(self.name)(torch)(value)
        else:
            home, _, name = self.name.rpartition(".")
            setattr(attrgetter(home)(torch), name, value)


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that has changed.

    Args:
        name: what a job's code calls or sets.
        old: the value before.
        new: the value after.
    """

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        """Return it as text."""
        return f"{self.name} from {self.old} to {self.new}"


# A switch comes before the finer ones that it sets, too.
_SETTINGS: Final = (
    _Setting("set_default_dtype", "get_default_dtype"),
    _Setting("set_num_threads", "get_num_threads"),
    _Setting("use_deterministic_algorithms", "are_deterministic_algorithms_enabled"),
    _Setting("backends.fp32_precision"),
    _Setting("set_float32_matmul_precision", "get_float32_matmul_precision"),
    _Setting("autograd.set_detect_anomaly", "is_anomaly_enabled"),
    _Setting("backends.cudnn.allow_tf32"),
    _Setting("backends.cudnn.enabled"),
    _Setting("backends.cudnn.benchmark"),
    _Setting("backends.cudnn.deterministic"),
    _Setting("backends.cudnn.conv.fp32_precision"),
    _Setting("backends.cuda.matmul.fp32_precision"),
    _Setting("backends.cuda.matmul.allow_fp16_reduced_precision_reduction"),
    _Setting("backends.cuda.matmul.allow_bf16_reduced_precision_reduction"),
    _Setting("backends.cuda.matmul.allow_fp16_accumulation"),
    _Setting("backends.mkldnn.enabled"),
    _Setting("backends.mkldnn.matmul.fp32_precision"),
    _Setting("backends.cuda.enable_flash_sdp", "backends.cuda.flash_sdp_enabled"),
    _Setting(
        "backends.cuda.enable_mem_efficient_sdp",
        "backends.cuda.mem_efficient_sdp_enabled",
    ),
    _Setting("backends.cuda.enable_math_sdp", "backends.cuda.math_sdp_enabled"),
    _Setting("backends.cuda.enable_cudnn_sdp", "backends.cuda.cudnn_sdp_enabled"),
)


def read_settings() -> Settings:
    """Return the values of all settings."""
    return tuple(setting.read() for setting in _SETTINGS)


def set_settings(values: Settings) -> tuple[Change, ...]:
    """Set all settings, as `read_settings` has returned them; return what changes."""
    now = read_settings()
    if now == values:  # after nearly each iteration
        return ()
    for setting, value in zip(_SETTINGS, values, strict=True):
        # To put one may import what takes seconds, or set another one.
        if value != _MIXED and setting.read() != value:
            setting.put(value)
    return tuple(
        Change(f"torch.{setting.name}", old, new)
        for setting, old, new in zip(_SETTINGS, values, now, strict=True)
        if old != new
    )


_WAIT_S: Final = 0.01  # for a draw of another job


class SharedState:
    """Detects changes of the process's settings and generators, and undoes them.

    Args:
        device: the jobs' device.
        generators: the device's default generators.
        randoms: the random state of each job, by its name.

    Attributes:
        num_threads: torch's, for the threads of jobs, too.
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
        self.num_threads = torch.get_num_threads()
        self._randoms = randoms
        self._num_draws: dict[str, int] = {}  # at the last check
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._suspects: set[str] = set()  # have run since the last check
        self._unguarded: set[str] = set()
        self._errors: dict[str, HocketError] = {}
        self._is_over = False

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
        """Mark that a job waits or has ended; the next check finds its changes."""
        self._running.discard(job)  # without the lock, for which a check may wait

    def check(self, job: str) -> None:
        """Look for changes after a job's code has run, and undo them.

        Raises:
            ConfigError: it, or a job that has run beside it, has changed a setting.
            RunError: it, or a job that has run beside it, drew unguarded numbers.
            StoppedError: no job shares the process any more.
        """
        # A job that hangs in a draw holds the generators: a later check looks at them.
        is_free = bool(self._unguarded) and self._generator_lock.acquire(_WAIT_S)
        try:
            with self._lock:
                if self._is_over:
                    raise StoppedError
                self._running.discard(job)
                if job not in self._errors:
                    self._look(is_free=is_free)
                if job in self._errors:
                    raise self._errors[job]
        finally:
            if is_free:
                self._generator_lock.release()

    def close(self) -> None:
        """Leave settings and generators as they are from now on."""
        with self._lock:
            self._is_over = True

    def restore_generators(self) -> None:
        """Put the generators' states back."""
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)

    def _look(self, *, is_free: bool) -> None:
        """Undo changes, and record an error for each job that may have used them.

        Args:
            is_free: whether no guarded job draws meanwhile.
        """
        changes = set_settings(self._settings)
        for name in self._suspects if changes else ():
            error = _settings_error(name, self._suspects, changes)
            self._errors.setdefault(name, error)
        drawers = self._suspects & self._unguarded
        if drawers and not is_free:
            return
        if drawers and self._is_drawn():
            for name in drawers | {x for x in self._suspects if self._draws(x)}:
                self._errors.setdefault(name, _draw_error(name, drawers))
        self._suspects = set(self._running)
        self._num_draws = {name: x.num_draws for name, x in self._randoms.items()}

    def _draws(self, job: str) -> bool:
        """Return whether a job has drawn with a guard since the last check.

        An unguarded draw at the same moment may have taken one of its numbers.
        """
        return self._randoms[job].num_draws > self._num_draws.get(job, 0)

    def _is_drawn(self) -> bool:
        """Return whether the generators' states have changed; put them back."""
        now = [x.get_state() for x in self._generators]
        if all(map(torch.equal, now, self._states)):
            return False
        self.restore_generators()
        return True


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
