"""What jobs that shared a device have done: speeds, memory, delays, errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite, isnan, nan
from typing import Final

from hocket.core.timelines.idle import Cause
from hocket.core.timelines.memory import MemoryCurve
from hocket.draw.quantity import byte_size, percent, seconds
from hocket.errors import RunError
from hocket.sharing.board import Iteration
from hocket.sharing.forecast import Forecast, summed
from hocket.sharing.policy import Mode
from hocket.sharing.simulate import ModePrediction

HEAD: Final = (
    *("job", "iterations", "alone", "shared", "speed"),
    *(f"idle: {cause.value}" for cause in (Cause.JOB, Cause.DATA)),
    *("peak", ""),
)


@dataclass(frozen=True, slots=True, eq=False)
class JobReport:
    """What one job has done.

    Args:
        name: the job.
        weight: its weight.
        losses: what its `step` returned, one per iteration that ended; nan for nothing.
        iterations: when each ran.
        first_shared: the first iteration in the mode that was asked for or chosen.
        until_s: when the first of the jobs ended.
        alone_s: the mean seconds of its iterations alone, by kind; nan if unknown.
        static_bytes: what it holds between iterations.
        forecast: its last iteration, with its memory; None if none was seen.
        num_wrong: how often its forecast did not hold.
        error: what ended it early; None if nothing did.
        is_hung: whether an iteration took longer than its timeout. If it ran in a
            thread, that is abandoned, and its memory is lost.
    """

    name: str
    weight: float
    losses: tuple[float, ...]
    iterations: tuple[Iteration, ...]
    first_shared: int
    until_s: float
    alone_s: Mapping[str, float]
    static_bytes: float
    forecast: Forecast | None
    num_wrong: int
    error: BaseException | None
    is_hung: bool

    @property
    def shared(self) -> tuple[Iteration, ...]:
        """Return its iterations after the trial, while all jobs were at work."""
        own = self.iterations[self.first_shared :]
        found = tuple(x for x in own if x.end_s <= self.until_s)
        return found if len(found) > 1 else self.iterations

    @property
    def solo_s(self) -> float:
        """Return the mean seconds of a shared iteration alone; nan if unknown."""
        alone, _ = self._comparable
        return sum(alone) / len(alone) if alone else nan

    @property
    def shared_s(self) -> float:
        """Return the mean time from the end of an iteration to that of the next."""
        _, shared = self._comparable
        return sum(shared) / len(shared) if shared else inf

    @property
    def speed(self) -> float:
        """Return the time that its iterations take alone over that shared."""
        return self.solo_s / self.shared_s

    @property
    def _comparable(self) -> tuple[list[float], list[float]]:
        """Return the seconds alone and shared of iterations of which both are known."""
        found = [
            (self.alone_s.get(b.kind, nan), b.end_s - a.end_s)
            for a, b in pairwise(self.shared)
        ]
        found = [x for x in found if not isnan(x[0])]
        return [alone for alone, _ in found], [shared for _, shared in found]

    @property
    def delay_s(self) -> float:
        """Return how long gates held a shared iteration, on average."""
        own = self.shared
        return sum(x.delay_s for x in own) / len(own) if own else 0.0

    @property
    def idle_s(self) -> dict[Cause, float]:
        """Return for how long a shared iteration waits, by cause, on average.

        Another job: gates held it. Data: the batch came later than the iteration before
        had ended; in turns a job reads its batch within its own turn.
        """
        own = self.shared
        late = [b.request_s - a.end_s for a, b in pairwise(own)]
        data_s = sum(late) / len(late) if late else 0.0
        return {Cause.JOB: self.delay_s, Cause.DATA: data_s}

    @property
    def peak_bytes(self) -> float:
        """Return the most that it held."""
        return self.static_bytes + (self.forecast.curve.peak if self.forecast else 0)


@dataclass(frozen=True, slots=True, eq=False)
class ShareReport:
    """What `hocket.share` has done. `print(report)` shows it as a table.

    Args:
        mode: the mode that was asked for, or chosen.
        why: why it was chosen.
        jobs: one report for each.
        budget_bytes: the most that all jobs may hold; inf for no limit.
        predictions: in `auto`, what each mode was predicted to be.
        notes: what else there is to know.
    """

    mode: Mode
    why: str
    jobs: tuple[JobReport, ...]
    budget_bytes: float
    predictions: tuple[ModePrediction, ...] = ()
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> JobReport:
        """Return the report of a job."""
        return next(job for job in self.jobs if job.name == name)

    @property
    def memory(self) -> MemoryCurve:
        """Return the counted bytes of all jobs while they shared, over time."""
        static_bytes = sum(job.static_bytes for job in self.jobs)
        curve = summed([x for job in self.jobs for x in placed_curves(job, job.shared)])
        return MemoryCurve(curve.time_s, curve.amount + static_bytes)

    @property
    def peak_bytes(self) -> float:
        """Return the most that all jobs held at once, as counted."""
        return self.memory.peak

    @property
    def total_speed(self) -> float:
        """Return the sum of the jobs' speeds; jobs in turns have about 1."""
        return sum(job.speed for job in self.jobs if isfinite(job.speed))

    @property
    def held(self) -> str:
        """Return the peak as text, beside the budget if there is one."""
        is_limited = isfinite(self.budget_bytes)
        budget = f" of {byte_size(self.budget_bytes)}" if is_limited else ""
        return f"{byte_size(self.peak_bytes)}{budget}"

    def check(self) -> None:
        """Raise an error if a job did not end well.

        Raises:
            RunError: names the jobs that failed.
        """
        failed = [job for job in self.jobs if job.error is not None or job.is_hung]
        if failed:
            texts = "; ".join(f"{job.name!r}: {_outcome(job)}" for job in failed)
            raise RunError(f"jobs that shared a device failed: {texts}")

    def __str__(self) -> str:
        """Return the report as text."""
        rows = [HEAD, *(row_of(job) for job in self.jobs)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
        lines = [
            "  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        first = f"mode {self.mode.value}: {self.why}"
        last = f"together: {self.total_speed:.2f} times one job alone; peak {self.held}"
        return "\n".join([first, *lines, last, *self.notes])


def row_of(job: JobReport) -> list[str]:
    """Return a job's row of the table."""
    return [
        job.name,
        str(len(job.iterations)),
        seconds(job.solo_s) if isfinite(job.solo_s) else "?",
        seconds(job.shared_s) if isfinite(job.shared_s) else "?",
        percent(job.speed) if isfinite(job.speed) else "?",
        *map(seconds, job.idle_s.values()),
        byte_size(job.peak_bytes),
        _outcome(job),
    ]


def placed_curves(
    job: JobReport, iterations: Sequence[Iteration]
) -> list[tuple[float, MemoryCurve]]:
    """Return the memory of iterations, each with when it started."""
    if job.forecast is None:
        return []
    return [(x.start_s, job.forecast.retimed(*_durations(x)).curve) for x in iterations]


def _durations(x: Iteration) -> tuple[float, float]:
    return x.backward_s - x.start_s, x.end_s - x.backward_s


def _outcome(job: JobReport) -> str:
    if job.error is not None:
        first = next(iter(str(job.error).splitlines()), "")
        return f"ended by {type(job.error).__name__}: {first}"
    if job.is_hung:
        held = byte_size(job.peak_bytes)
        return f"hung: its thread is abandoned, and up to {held} are lost"
    return ""
