"""The rule of sharing: which jobs may go on now. A pure function, tested with no clock.

    turns       A████████        A████████          one iteration at a time, and next
                         B██████          B██████   the job furthest behind its share
    tick-tock   A▁▁▁███████ ▁▁▁███████              no two forwards ▁ overlap, and no
                B   ▁▁▁ ███████▁▁▁ ███████          two backwards █
    lag         A▁▁▁██████▁▁▁██████                 half an iteration apart
                B     ▁▁▁██████▁▁▁██████
    budget      A▁▁▁██████▁▁▁██████                 at the first moment at which the sum
                B  ▁▁▁██████▁▁▁██████               of the memory curves fits

A job waits at a gate: before each iteration, and in `tick-tock` before each forward and
backward. `decide` says which jobs may pass; the board calls it at each change, and
again at `look_s`.

Weights are shares of the device's time in `turns` and `budget`; time in which several
jobs run is divided evenly among them. In `budget` a job that is more than an iteration
ahead of another one, relative to their shares, waits while that one runs.

Sources: Zico (Lim et al., ATC 2021), section 4.3, for `budget`, with reservations so
that a large iteration is not overtaken for ever; Wavelet (Wang et al., MLSys 2021) and
its published code for `tick-tock`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import Final, assert_never

from hocket.core.timelines.memory import MemoryCurve
from hocket.sharing.forecast import ALMOST_S, Forecast, earliest_start_s, summed


class Mode(Enum):
    """How jobs share a device."""

    AUTO = "auto"  # measure, and take the best of the others
    TURNS = "turns"
    LAG = "lag"
    BUDGET = "budget"
    TICK_TOCK = "tick-tock"
    FREE = "free"  # no gates at all, for comparison


class Point(Enum):
    """Where a job is."""

    AWAY = auto()  # before or between iterations: it loads data
    WAITS = auto()  # at the gate of an iteration, or in tick-tock of a forward
    FORWARD = auto()
    WAITS_BACKWARD = auto()  # in tick-tock only
    BACKWARD = auto()


_PATIENCE: Final = 2.0  # times as long as a job last loaded, others wait for it
# Of an iteration: a late backward is assumed to have this share left.
_LAST: Final = 0.02

RUNNING: Final = (Point.FORWARD, Point.BACKWARD)
WAITING: Final = (Point.WAITS, Point.WAITS_BACKWARD)
ADMITTING: Final = frozenset({Mode.LAG, Mode.BUDGET})  # they read memory curves
WITH_SHARES: Final = frozenset({Mode.TURNS, Mode.BUDGET, Mode.AUTO})
WITH_SLOWDOWNS: Final = WITH_SHARES | {Mode.LAG}


@dataclass(slots=True)
class JobState:
    """What the policy knows of a job at one moment; kept by the board.

    Args:
        name: the job's name.
        weight: its share of the device's time, relative to the other jobs'.
        point: where it is.
        point_s: since when.
        start_s: when it last started an iteration; -inf if it never did.
        num_starts: the iterations (in tick-tock: forwards) it started in this mode.
        num_backwards: the backwards it started in this mode.
        device_s: the device's time that it has used in this mode.
        missed_s: in `budget`, time charged to it while it loaded data and others ran.
        static_bytes: what it holds between iterations.
        forecast: its next iteration; None if none has been seen.
        error_s: how far its last iterations were from their forecast durations.
        is_trusted: whether the last forecast held; if not, its iterations run alone.
        is_urgent: whether it is slower than its `max_slowdown` allows.
        away_s: how long it loaded data before its last iteration.
    """

    name: str
    weight: float
    point: Point = Point.AWAY
    point_s: float = 0.0
    start_s: float = -inf
    num_starts: int = 0
    num_backwards: int = 0
    device_s: float = 0.0
    missed_s: float = 0.0
    static_bytes: float = 0.0
    forecast: Forecast | None = None
    error_s: float = 0.0
    is_trusted: bool = False
    is_urgent: bool = False
    away_s: float = 0.0

    @property
    def used(self) -> float:
        """Return the device's time that it has used or missed, relative to its share.

        In `budget` it has no claim to the time in which it loads data.
        """
        return (self.device_s + self.missed_s) / self.weight

    @property
    def longest_used(self) -> float:
        """Return by how much an iteration can raise `used`."""
        return self.forecast.seconds / self.weight if self.forecast else 0.0

    def ahead_of(self, other: JobState) -> float:
        """Return by how much more than an iteration it is ahead of another job.

        An iteration is allowed: of two equal jobs that overlap, one starts first.
        """
        allowed = max(self.longest_used, other.longest_used)
        return self.used - other.used - allowed

    @property
    def back_s(self) -> float:
        """Return until when others may wait for it; -inf if none may.

        One that loads for longer than it trains is not waited for.
        """
        if self.point is not Point.AWAY or self.forecast is None:
            return -inf
        loads = self.away_s <= self.forecast.seconds
        return self.point_s + _PATIENCE * self.away_s if loads else -inf

    def come_to(self, point: Point, now_s: float) -> None:
        """Come to another point."""
        self.point, self.point_s = point, now_s

    def placed(self, now_s: float) -> tuple[float, MemoryCurve]:
        """Return its running iteration's curve, and when that would have started.

        The last mark (start of the forward or backward) places the curve. A late
        forward stays at the forward's end; a late backward, shortly before the
        iteration's.
        """
        assert self.forecast is not None
        spent_s = now_s - self.point_s
        if self.point is Point.BACKWARD:
            last_s = self.forecast.backward_s - _LAST * self.forecast.seconds
            spent_s = min(spent_s, max(last_s, 0.0)) + self.forecast.forward_s
        else:
            spent_s = min(spent_s, self.forecast.forward_s)
        return now_s - spent_s, self.forecast.curve


@dataclass(frozen=True, slots=True)
class Decision:
    """Which jobs may pass the gate at which they wait.

    Args:
        starts: their names, in order.
        look_s: when to ask again even if nothing changes; inf for never.
    """

    starts: tuple[str, ...] = ()
    look_s: float = inf


def decide(
    mode: Mode, jobs: Sequence[JobState], budget_bytes: float, now_s: float
) -> Decision:
    """Return which jobs may go on.

    Args:
        mode: not `AUTO`.
        jobs: all jobs that have not ended, in a fixed order.
        budget_bytes: the most that all of them may hold; inf for no limit.
        now_s: the time.
    """
    running = [job for job in jobs if job.point in RUNNING]
    if running and mode is Mode.TURNS:
        return Decision()
    waiting = [job for job in jobs if job.point in WAITING]
    # Urgent ones first, then the one that is furthest behind its share.
    waiting.sort(key=lambda job: (not job.is_urgent, job.used))
    match mode:
        case Mode.TURNS:
            found = _turn(waiting, jobs, now_s)
        case Mode.FREE:
            found = _only(waiting)
        case Mode.TICK_TOCK:
            found = _only([job for job in waiting if _is_next_wave(job, jobs)][:1])
        case Mode.LAG:
            urgent = [job for job in waiting if job.is_urgent]
            following = _in_rotation(jobs)
            first = urgent or [job for job in waiting if job is following]
            queue = [
                (job, now_s if urgent else _lag_start_s(job, jobs)) for job in first
            ]
            found = _admit(queue, running, jobs, budget_bytes, now_s)
        case Mode.BUDGET:
            found = _within_shares(waiting, running, jobs, budget_bytes, now_s)
        case Mode.AUTO:
            raise AssertionError("auto is decided before jobs are admitted")
        case _:
            assert_never(mode)
    is_stuck = len(waiting) == len(jobs) and found == Decision()
    return _only(waiting[:1]) if is_stuck else found


def _only(jobs: Sequence[JobState]) -> Decision:
    return Decision(tuple(job.name for job in jobs))


def _turn(
    waiting: Sequence[JobState], jobs: Sequence[JobState], now_s: float
) -> Decision:
    """Let the job that is furthest behind its share go, or wait while it loads data.

    If the others went on meanwhile, jobs would alternate whatever their weights.
    """
    if not waiting or waiting[0].is_urgent:
        return _only(waiting[:1])
    least = waiting[0].used
    back_s = max((job.back_s for job in jobs if job.used < least), default=-inf)
    return Decision((), back_s) if back_s > now_s else _only(waiting[:1])


def _within_shares(
    waiting: Sequence[JobState],
    running: Sequence[JobState],
    jobs: Sequence[JobState],
    budget_bytes: float,
    now_s: float,
) -> Decision:
    """Admit jobs by their memory that are not too far ahead of others.

    Jobs away but due soon count too; otherwise jobs would alternate whatever their
    weights, as `_turn` says.
    """
    queue: list[tuple[JobState, float]] = []
    look_s = inf
    there = [x for x in jobs if x.point is not Point.AWAY or x.back_s > now_s]
    for job in waiting:
        behind = [x for x in there if job.ahead_of(x) > ALMOST_S]
        if job.is_urgent or not behind:
            queue.append((job, now_s))
        for other in behind:
            if other.point in RUNNING:  # it catches up, and the faster the fewer run
                left_s = job.ahead_of(other) * other.weight * len(running)
                look_s = min(look_s, now_s + max(left_s, ALMOST_S))
            elif other.point is Point.AWAY:
                look_s = min(look_s, other.back_s)
    found = _admit(queue, running, jobs, budget_bytes, now_s)
    return Decision(found.starts, min(found.look_s, look_s))


def _in_rotation(jobs: Sequence[JobState]) -> JobState | None:
    """Return the job whose turn it is: that with the fewest starts."""
    return min(jobs, key=lambda job: job.num_starts, default=None)


def _is_next_wave(job: JobState, jobs: Sequence[JobState]) -> bool:
    """Return whether no other job is in the same half, and it is this one's turn."""
    if job.point is Point.WAITS:
        return job is _in_rotation(jobs) and all(
            other.point is not Point.FORWARD for other in jobs
        )
    return job is min(jobs, key=lambda other: other.num_backwards) and all(
        other.point is not Point.BACKWARD for other in jobs
    )


def _admit(
    queue: Sequence[tuple[JobState, float]],
    running: Sequence[JobState],
    jobs: Sequence[JobState],
    budget_bytes: float,
    now_s: float,
) -> Decision:
    """Let each job start at the first moment at which it fits, and not before its time.

    A job that does not fit yet keeps its place: those after it start only where they
    do not delay it.
    """
    limit_bytes = budget_bytes - sum(job.static_bytes for job in jobs)
    if any(_runs_alone(job, limit_bytes) for job in running):
        return Decision()
    if any(job.is_urgent for job in (*running, *(job for job, _ in queue))):
        queue = [x for x in queue if x[0].is_urgent]  # nothing slows them more
    placed = [job.placed(now_s) for job in running]
    error_s = max(job.error_s for job in jobs)
    starts: list[str] = []
    look_s = inf
    for job, from_s in queue:
        if job.forecast is None or _runs_alone(job, limit_bytes):
            if not placed:
                starts.append(job.name)
            break
        curve, from_s = job.forecast.curve, max(from_s, now_s)
        beside = summed(placed)
        start_s = earliest_start_s(curve, beside, limit_bytes, from_s, error_s)
        placed.append((start_s, curve))
        if start_s <= now_s + ALMOST_S / 2:
            starts.append(job.name)
        else:
            look_s = min(look_s, start_s)
    return Decision(tuple(starts), look_s)


def _runs_alone(job: JobState, limit_bytes: float) -> bool:
    """Return whether no other job may run beside it.

    Its forecast did not hold, or does not fit: jobs grow, and budgets shrink.
    """
    forecast = job.forecast
    is_too_large = forecast is not None and forecast.curve.peak > limit_bytes
    return is_too_large or not job.is_trusted


def _lag_start_s(job: JobState, jobs: Sequence[JobState]) -> float:
    """Return when a job may follow the one that started last.

    The slowest job sets the period; jobs of equal periods never wait.
    """
    others = [other for other in jobs if other is not job]
    if not others:
        return -inf
    longest_s = max(x.forecast.seconds if x.forecast else 0.0 for x in jobs)
    return max(other.start_s for other in others) + longest_s / len(jobs)
