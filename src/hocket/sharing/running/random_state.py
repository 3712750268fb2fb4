"""Random numbers of each job, as if it were alone.

torch has one default generator for each device, for all threads. A job's draws hold it:

    job a   ... dropout ...            lock, put a's state, draw, keep a's state, unlock
    job b         ... randn ...                 waits for the lock, the same with b's

Draws are operators with `torch.Tag.nondeterministic_seeded`; and what reads or seeds
the generator itself (`torch.manual_seed`, activation checkpointing) goes through a
proxy that finds the job by its thread. In mode `turns` the job's own thread needs
neither: its state is set when a turn begins, and saved when the turn ends.

The operator mode and the proxy call `DrawRule.held`. It raises an error in a thread
that a job has started (`JobThreads`), in every mode.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from hocket import cuda
from hocket.errors import ConfigError, HocketError, RunError, WaitError
from hocket.model.trace.observe import is_random
from hocket.model.trace.replaced import replaced
from hocket.run.device.generators import generator_lock
from hocket.run.device.operator_mode import OperatorMode, runs_compiled

_PROXIED: Final = ("get_state", "set_state", "manual_seed", "seed", "initial_seed")
_TIMEOUT_S: Final = 600.0


def default_generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """Return the default generators that work on a device draws from."""
    if device.type == "cuda":
        return torch.default_generator, cuda.generator(device)
    return (torch.default_generator,)


class DrawRule(ABC):
    """How a thread draws from the default generators.

    Args:
        generators: the default generators of its device.

    Attributes:
        subject: names the thread in errors, by its job.
        ways_out: how to let it do what may not run beside other jobs.
    """

    subject: ClassVar[str] = "job {!r}"
    ways_out: ClassVar[str] = 'mode="turns", processes=True'

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = generators
        self._process, self._is_over = os.getpid(), False

    @property
    def is_in_force(self) -> bool:
        """Return whether jobs share the calling process now."""
        return os.getpid() == self._process and not self._is_over

    def close(self) -> None:
        """Allow draws: a thread that outlives all jobs may still draw."""
        self._is_over = True

    def refused(self, error: HocketError) -> None:  # noqa: B027
        """Note that an error is raised in the thread; nothing to do for a job's own."""

    @abstractmethod
    def held(self, what: str) -> AbstractContextManager[None]:
        """Return a context in which the thread may draw, or which raises.

        Args:
            what: the operator or function that draws.
        """


class _Thread(threading.local):
    """The draw rule of the current thread.

    Attributes:
        draws: the rule; None if the thread draws without one.
    """

    draws: DrawRule | None = None


THREAD: Final = _Thread()


class JobRandom(DrawRule):
    """The random state of one job.

    Args:
        device: the job's device.
        generators: the device's default generators.
        seed: the seed of its state at first.

    Attributes:
        num_draws: how often the job has held the generators, other than for a turn.
    """

    def __init__(
        self, device: torch.device, generators: Sequence[torch.Generator], seed: int
    ) -> None:
        super().__init__(generators)
        self._lock = generator_lock(device)
        self._is_held = False
        self.num_draws = 0
        made = [torch.Generator(x.device).manual_seed(seed) for x in generators]
        self._states = [x.get_state() for x in made]

    def set_state(self) -> None:
        """Let the device's generators continue this job's numbers."""
        for generator, state in zip(self.generators, self._states, strict=True):
            generator.set_state(state)

    def save_state(self) -> None:
        """Keep the generators' states as this job's, in place: memory is watched."""
        for generator, state in zip(self.generators, self._states, strict=True):
            state.copy_(generator.get_state())

    @contextmanager
    def held(self, what: str = "") -> Iterator[None]:
        """Draw this job's numbers in the block; others wait, and see no change.

        A process that was forked (a DataLoader's worker) has generators of its own.

        Raises:
            WaitError: another job holds the generators for ten minutes.
        """
        if self._is_held or not self.is_in_force:
            yield
            return
        if not self._lock.acquire(_TIMEOUT_S):
            raise WaitError(
                f"waited {_TIMEOUT_S:.0f} s for torch's default generator, which "
                "another job holds"
            )
        self._is_held = True
        try:
            before = [generator.get_state() for generator in self.generators]
            self.num_draws += 1
            self.set_state()
            try:
                yield
            finally:
                self._put_back(before)
        finally:
            self._is_held = False
            self._lock.release()

    def _put_back(self, before: Sequence[Tensor]) -> None:
        """Keep the job's state, and let the generators be in the one before."""
        if self._is_over:
            return
        self.save_state()
        for generator, state in zip(self.generators, before, strict=True):
            generator.set_state(state)


class DrawGuard(OperatorMode):
    """Applies a `DrawRule` to operators that draw from the default generators.

    Code that `torch.compile` has made would run eagerly under it, and is refused.

    Args:
        job: the job's name.
        draws: the rule.
    """

    def __init__(self, job: str, draws: DrawRule) -> None:
        super().__init__()
        self._job, self._draws = job, draws
        # torch hands an operator another object for the same generator.
        self._defaults = {_identity(x) for x in draws.generators}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call the operator."""
        if runs_compiled() and self._draws.is_in_force:
            error = ConfigError(
                f"{self._draws.subject.format(self._job)} runs code that torch.compile "
                "has made; where random draws are watched, that runs eagerly, and its "
                f"numbers differ from those alone: use {self._draws.ways_out}, "
                "torch.compiler.disable, or for a job that draws nothing draws=False"
            )
            self._draws.refused(error)
            raise error
        kwargs = kwargs or {}
        given = kwargs.get("generator")
        is_own = given is not None and _identity(given) not in self._defaults
        if is_own or not is_random(func, args, kwargs):
            return func(*args, **kwargs)
        with self._draws.held(str(func)):
            return func(*args, **kwargs)


def _identity(generator: Any) -> int:
    return int(generator._cdata)


class _Proxy:
    """A default generator that applies the calling thread's `DrawRule`."""

    def __init__(self, real: torch.Generator) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        method, draws = getattr(self._real, name), THREAD.draws
        if name not in _PROXIED or draws is None:
            return method

        def call(*args: Any) -> Any:
            with draws.held(f"{name} of torch's default generator"):
                return method(*args)

        return call


@contextmanager
def generators_by_thread(device: torch.device) -> Iterator[None]:
    """Let functions such as `torch.get_rng_state` use the calling job's state."""
    put_back = None
    if device.type == "cuda":
        put_back = cuda.replace_generator(device, _Proxy)
    try:
        with _proxied(torch.random):
            yield
    finally:
        if put_back is not None:
            put_back()


def default_generator_by_thread() -> AbstractContextManager[None]:
    """Replace `torch.default_generator` as well; operators then refuse it."""
    return _proxied(torch)


def _proxied(module: Any) -> AbstractContextManager[None]:
    proxy: Any = _Proxy
    return replaced(module, "default_generator", by=proxy)


# Threads that jobs start: a job's prefetching, its ThreadPoolExecutor.
#
#     share ── job a ── Thread(prefetch).start()    draws from the default generator:
#           └─ job b                                refused, and job a ends
#
# torch's default generators hold the numbers of the job whose turn or draw it is: a
# draw of another thread takes some of them. So `Thread.start` is replaced while jobs
# share: a thread that a job's thread starts may draw from generators of its own only.
class JobThreads(DrawRule):
    """The threads that one job starts.

    Args:
        job: the job's name.
        generators: the default generators of its device.

    Attributes:
        error: the first error of these threads; it ends the job.
        on_refused: called after each such error.
    """

    subject = "a thread that job {!r} has started"
    ways_out = "processes=True"

    def __init__(self, job: str, generators: Sequence[torch.Generator]) -> None:
        super().__init__(generators)
        self.error: HocketError | None = None
        self.on_refused: Callable[[], None] = lambda: None
        self.job = job

    def enter(self) -> None:
        """Count threads that the calling thread starts as this job's."""
        _STARTER.threads = self

    def check(self) -> None:
        """Raise the error of a thread that has drawn."""
        if self.error is not None:
            raise self.error.with_traceback(None)

    def close(self) -> None:
        """Allow draws again in threads that outlive all jobs."""
        super().close()
        self.on_refused = lambda: None  # such a thread must not keep the jobs alive

    def start(self, thread: threading.Thread) -> None:
        """Wrap a thread's `run`, before it starts, to refuse draws."""
        if self.is_in_force:
            run: Any = partial(self._run, thread, thread.run)
            thread.run = run  # type: ignore[method-assign]

    @contextmanager
    def held(self, what: str) -> Iterator[None]:
        """Raise an error: these threads may not draw from the default generators.

        Raises:
            RunError: says how a thread may draw.
        """
        if self.is_in_force:
            error = RunError(
                f"{self.subject.format(self.job)} drew from torch's "
                f"default generator ({what}), whose numbers all jobs of the process "
                "take: give the thread a torch.Generator of its own, load data by a "
                "DataLoader with num_workers above 0, or use processes=True"
            )
            self.refused(error)
            raise error
        yield

    def refused(self, error: HocketError) -> None:
        """Let an error that is raised in a thread end the job."""
        self.error = self.error or error
        self.on_refused()

    def _run(self, thread: threading.Thread, work: Callable[[], None]) -> None:
        """Run a thread's function; the job reports what is refused in it."""
        vars(thread).pop("run", None)  # holds the thread itself
        self.enter()
        THREAD.draws = self
        try:
            with DrawGuard(self.job, self):
                work()
        except HocketError as error:
            if error is not self.error:
                raise


class _Starter(threading.local):
    """The job that the current thread belongs to.

    Attributes:
        threads: the threads of that job; None if the thread belongs to no job.
    """

    threads: JobThreads | None = None


_STARTER: Final = _Starter()


def shared_job() -> str | None:
    """Return the calling thread's job, if other jobs may run now; else None."""
    threads, draws = _STARTER.threads, THREAD.draws
    if threads is None or draws is None or not draws.is_in_force:
        return None
    return threads.job


def _start_of_job(start: Callable[..., None]) -> Callable[..., None]:
    def start_of_job(thread: threading.Thread) -> None:
        if _STARTER.threads is not None:
            _STARTER.threads.start(thread)
        start(thread)

    return start_of_job


def starts_seen() -> AbstractContextManager[None]:
    """Replace `Thread.start` in the block, to see which job starts a thread."""
    return replaced(threading.Thread, "start", by=_start_of_job)
