"""One job's thread: loads a batch, waits at the gate, trains, is watched.

    make ─▶ ┌ next batch ─▶ gate ─▶ forward ─▶ backward ─▶ update ─▶ device is done ┐
            └───────────────────────────────◀────────────────────────────────────────┘

In turns the batch is loaded within the turn, as the job would alone.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from math import nan
from typing import Any, Final, SupportsFloat, SupportsIndex, TypeVar

import torch

from hocket import cuda
from hocket.draw.quantity import byte_size
from hocket.errors import ConfigError, HocketError, NoMemoryError
from hocket.run.device.device import Device
from hocket.run.device.memory import is_out_of_memory
from hocket.sharing.policy import ADMITTING, Mode, Point
from hocket.sharing.running.gate import Gates, StoppedError
from hocket.sharing.running.job import Job, JobContext, Step, made_parts, no_memory
from hocket.sharing.running.memory_log import MemoryLog, open_log
from hocket.sharing.running.random_state import THREAD, DrawGuard, JobRandom, JobThreads
from hocket.sharing.running.shared_state import SharedState

NUM_WATCHED: Final = 2  # iterations of a log: sizes are known from the second on
_LIMIT_EVERY: Final = 50  # iterations after which a job's own limit is checked again
_END: Final[Any] = object()
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SharedSettings:
    """What all jobs of one call share.

    Args:
        gate: their gates.
        mode: the mode that was asked for.
        num_iterations: after which each job ends; None at the end of its batches.
        state: torch's settings and generators; None where each has its own process.
    """

    gate: Gates
    mode: Mode
    num_iterations: int | None
    state: SharedState | None = None


class JobRunner(JobContext):
    """Runs one job in a thread.

    Args:
        job: the job.
        shared: what it shares with others.
        device: its device, with a lane of its own; in turns, with that of all jobs.
        random: its random state.

    Attributes:
        own_threads: the threads that it starts.
        losses: what its steps returned.
        error: what ended it, if it was not the end of its batches.
    """

    def __init__(
        self, job: Job, shared: SharedSettings, device: Device, random: JobRandom
    ) -> None:
        self.name = job.name
        self.device = device.torch_device
        self.random = random
        self.own_threads = JobThreads(job.name, random.generators)
        self.losses: list[Any] = []
        self.error: BaseException | None = None
        self.made = threading.Event()
        self.thread = threading.Thread(
            target=self.run, name=f"hocket job {job.name}", daemon=True
        )
        self._job, self._shared, self._gate = job, shared, shared.gate
        self._lanes = device
        self._log: MemoryLog | None = None
        self._num_logged = 0
        self._last_logged = 0  # iterations before the log's end
        # A host runs ahead of its device: the middle of an iteration is the device's.
        self._has_middle = shared.mode in {*ADMITTING, Mode.AUTO}
        self._in_turns = shared.mode is Mode.TURNS
        # In turns, and in its own process, the generators are the job's.
        self._has_own_random = self._in_turns or shared.state is None
        self._is_guarded = job.draws is not False and not self._has_own_random
        self._num_forwards = 0
        self._waves = False  # whether forward and backward have gates

    def abandon(self) -> None:
        """End the thread as soon as it runs Python again: it hangs.

        It must not go on: what it draws then would be another job's numbers.
        """
        self.error = self.own_threads.error  # it may wait for a thread that has ended
        if self.error is not None:
            _drop_frames(self.error)
        self._leave_state()
        ident = ctypes.c_ulong(self.thread.ident or 0)
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        raise_in(ident, ctypes.py_object(StoppedError))

    def join(self, *, is_hung: bool) -> None:
        """Wait for the end of the thread, if it was not abandoned."""
        if not is_hung:
            self.thread.join()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """See `JobContext.forward`."""
        self._num_forwards += 1
        if self._waves:
            self._gate.pass_through(self.name, Point.WAITS)
        yield
        if self._waves:
            self._finish_device()
            self._gate.pause(self.name)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """See `JobContext.backward`."""
        if self._has_middle:
            self._finish_device()
        if self._log is not None:
            self._log.backward()
        if self._waves:
            self._gate.pass_through(self.name, Point.WAITS_BACKWARD)
        else:
            self._gate.begin_backward(self.name)
        yield
        if self._waves:
            self._finish_device()
            self._gate.pause(self.name)

    def run(self) -> None:
        """Run the job to its end, in its thread."""
        torch.autograd.set_multithreading_enabled(False)
        if self.device.type == "cuda":
            cuda.use(self.device)
        if self._shared.state is not None:
            self.own_threads.enter()
            torch.set_num_threads(self._shared.state.num_threads)  # others may set it
        try:
            self._work()  # this frame lives on, and must hold nothing that it makes
        except StoppedError:
            pass
        except BaseException as error:
            self.error = self._explained(error)
            _drop_frames(self.error)
        finally:
            self._leave_state()
            self._end_log()
            self.made.set()
            self._gate.leave(self.name)

    def _work(self) -> None:
        step, batches = self._make()
        self._gate.wait_for_others(self.name)
        if not self._has_own_random:
            THREAD.draws = self.random
        self._train(step, batches)

    def _make(self) -> tuple[Step, Iterable[Any]]:
        """Make the job; no other one runs meanwhile."""
        if self._shared.state is not None:
            self._shared.state.enter(self.name)
        self._log = open_log(self.device)
        self.random.set_state()
        made = self._on_lane(lambda: self._job.make(self), "make")
        step, batches = made_parts(self.name, made)
        self.random.save_state()
        self._check_state()
        self.made.set()
        return step, batches

    def _train(self, step: Step, batches: Iterable[Any]) -> None:
        limit, guard = self._shared.num_iterations, self._guard()
        loader: Iterator[Any] | None = None
        while limit is None or len(self.losses) < limit:
            self._waves = self._gate.mode is Mode.TICK_TOCK
            if self._in_turns:
                self._gate.pass_through(self.name, Point.WAITS)
                self.random.set_state()
            self._enter_state()
            self._begin_log()
            with guard:
                if loader is None:
                    loader = self._on_lane(lambda: iter(batches), "load")
                batch = self._on_lane(lambda: next(loader, _END), "load")  # noqa: B023
                if batch is _END:
                    self._check_state()
                    return
                if not (self._in_turns or self._waves):
                    self._wait_at_gate()
                self._iterate(step, batch)
                batch = None
            if self._in_turns:
                self.random.save_state()
            guard = self._after_iteration(guard)

    def _wait_at_gate(self) -> None:
        self._leave_state()
        self._gate.pass_through(self.name, Point.WAITS)
        self._enter_state()

    def _iterate(self, step: Step, batch: Any) -> None:
        """Train one iteration, until the device is done."""
        if self._log is not None:
            self._log.begin()
        self.kind = ""
        loss = self._on_lane(lambda: step(batch), f"iteration {len(self.losses)}")
        self._finish_device()
        if self._log is not None:
            if self._num_logged >= NUM_WATCHED:
                gc.collect(1)  # uncollected cycles are no growth
            self._log.end()
        if not self._num_forwards:
            raise ConfigError(
                f"job {self.name!r} never called job.forward() in an iteration: wrap "
                "the forward in `with job.forward():`, and the backward in "
                "`with job.backward():`"
            )
        self._check_state()
        self.losses.append(_checked_loss(self.name, loss))

    def _enter_state(self) -> None:
        """Begin to run where a change of what all jobs share is seen."""
        if self._shared.state is not None:
            is_unguarded = not (self._is_guarded or self._has_own_random)
            self._shared.state.enter(self.name, is_unguarded=is_unguarded)

    def _leave_state(self) -> None:
        if self._shared.state is not None:
            self._shared.state.leave(self.name)

    def _check_state(self) -> None:
        if self._shared.state is not None:
            self._shared.state.check(self.name)

    def _after_iteration(
        self, guard: AbstractContextManager[Any]
    ) -> AbstractContextManager[Any]:
        """Read the log, and ask the gate; return the guard of the next iteration."""
        if self._log is not None:
            self._num_logged += 1
            if self._num_logged >= NUM_WATCHED:
                self._read_log(self._log)
        # A job that is watched on and on has no other iterations to be timed by.
        is_watched = 0 < self._num_logged <= NUM_WATCHED
        if self._log is None:
            self._num_logged = 0
        self._gate.finish(
            self.name, kind=self.kind, goes_on=self._in_turns, is_watched=is_watched
        )
        is_known = self._job.draws is None and len(self.losses) == NUM_WATCHED
        if is_known and self._is_guarded and not self.random.num_draws:
            self._is_guarded = False
            return nullcontext()
        return guard

    def _guard(self) -> AbstractContextManager[Any]:
        return DrawGuard(self.name, self.random) if self._is_guarded else nullcontext()

    def _begin_log(self) -> None:
        """Begin to watch memory, where the forecast did not hold or is old."""
        if self._log is None and (self._must_look or self._must_watch):
            self._log = open_log(self.device)

    def _end_log(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    @property
    def _must_look(self) -> bool:
        """Whether it is time to compare the job with its own limit."""
        num_since = len(self.losses) - self._last_logged
        return self._job.memory_bytes is not None and num_since >= _LIMIT_EVERY

    @property
    def _must_watch(self) -> bool:
        """Whether a limit or the mode reads the forecast, and it must be made again."""
        # Also in the turns before an admitting mode: growth that is not seen there
        # is missing from what the job is admitted by.
        is_admitted = {self._shared.mode, self._gate.mode} & ADMITTING
        is_counted = self._job.memory_bytes is not None or bool(is_admitted)
        return is_counted and self._gate.must_watch(self.name)

    def _read_log(self, log: MemoryLog) -> None:
        """Let the board judge the job's forecast; end the log unless the job grows."""
        seen = log.read()
        self._last_logged = len(self.losses)
        static = self._gate.observe(
            self.name, seen.forecast, seen.left_bytes, seen.grown_bytes
        )
        if not self._must_watch:
            self._end_log()
        peak = static + seen.forecast.curve.peak
        if self._job.memory_bytes is not None and peak > self._job.memory_bytes:
            raise no_memory(
                f"job {self.name!r} holds {byte_size(peak)}, of which "
                f"{byte_size(static)} stay after iteration {len(self.losses) - 1}"
                f"{_growth_text(seen.grown_bytes)}, and may hold "
                f"memory_bytes={self._job.memory_bytes:,} "
                f"({byte_size(self._job.memory_bytes)}): use smaller batches, keep "
                "fewer tensors from iteration to iteration (losses with their graphs, "
                f"a buffer), or give it {int(peak):,} bytes",
                int(peak),
            )

    def _on_lane(self, work: Callable[[], T], label: str) -> T:
        """Run work in the job's lane; return its result, or raise its error.

        The lane sees no error: one would end all jobs of its device.
        """
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:
                errors.append(error)

        self._lanes.lanes[0].submit(run, label=f"{label} of job {self.name}")
        for error in errors:
            raise error
        self.own_threads.check()
        return results[0]

    def _finish_device(self) -> None:
        """Wait until the device has done what the job gave it."""
        if self.device.type == "cpu":
            return
        event = self._lanes.new_event()
        self._lanes.lanes[0].submit(lambda: None, records=[event], label="wait")
        event.synchronize(self._job.timeout_s)

    def _explained(self, error: BaseException) -> BaseException:
        """Return what ended the job: an error of its code may have a cause outside."""
        try:
            self.own_threads.check()
            self._check_state()
        except HocketError as cause:
            if cause is not error:
                cause.__cause__ = error
            return cause
        if not isinstance(error, Exception) or isinstance(error, NoMemoryError):
            return error
        if not is_out_of_memory(error):
            return error
        first = next(iter(str(error).splitlines()), "")
        found = no_memory(
            f"job {self.name!r} found no memory on {self.device} in iteration "
            f"{len(self.losses)}: {first}; use smaller batches, or a smaller "
            "memory_bytes for all jobs, so that they overlap less",
            self._lanes.peak_bytes(),
        )
        found.__cause__ = error
        return found

    def loss_values(self) -> tuple[float, ...]:
        """Return the losses as numbers; nan where a step returned nothing."""
        return tuple(nan if x is None else float(x) for x in self.losses)


def _checked_loss(job: str, loss: Any) -> Any:
    """Return what a step returned, without its graph; a tensor is not waited for.

    Raises:
        ConfigError: it is no number.
    """
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and not loss.is_complex():
        return loss.detach()
    if loss is None or isinstance(loss, SupportsFloat | SupportsIndex):
        with suppress(TypeError, ValueError):
            return loss if loss is None else float(loss)
    what = type(loss).__name__
    if isinstance(loss, torch.Tensor):
        what = f"a tensor of type {loss.dtype} and shape {tuple(loss.shape)}"
    raise ConfigError(
        f"job {job!r}: step must return a number, a tensor of one element, or None; it "
        f"returned {what}: keep what else it computes itself"
    )


def _drop_frames(error: BaseException) -> None:
    """Keep an error's traceback as text: its frames hold the job's functions."""
    trace = "".join(traceback.format_exception(error))
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        found = left.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            traceback.clear_frames(found.__traceback__)
            found.__traceback__ = None
            left += [found.__cause__, found.__context__]
    error.add_note(f"in the job's thread:\n{trace}")


def _growth_text(grown_bytes: int) -> str:
    if grown_bytes <= 0:
        return ""
    return f", {byte_size(grown_bytes)} more than after the one before"
