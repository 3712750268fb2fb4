"""Play jobs with a fake clock: when each iteration would run, and what they hold.

The gates are the real ones. Jobs that run at the same time slow each other down by a
factor of each job's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from hocket.sharing.board import Board, Iteration
from hocket.sharing.forecast import Forecast
from hocket.sharing.policy import Mode, Point

_NOT_BEFORE_S: Final = 1e-12


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """A job to play.

    Args:
        name: its name.
        actual: what each of its iterations is, alone.
        num_iterations: how many it runs.
        weight: see `policy.JobState`.
        believed: what the policy is given at first; None for nothing.
        is_watched: whether each iteration's memory is seen when it ends.
        max_slowdown: see `board.JobRecord`.
        static_bytes: what it holds between iterations.
        grown_bytes: by how much more it holds after each iteration than before.
        away_s: how long it loads data before each iteration.
        join_s: when it comes.
        slowdown: how much longer its work takes beside other jobs.
    """

    name: str
    actual: Forecast
    num_iterations: int
    weight: float = 1.0
    believed: Forecast | None = None
    is_watched: bool = False
    max_slowdown: float = inf
    static_bytes: float = 0.0
    grown_bytes: float = 0.0
    away_s: float = 0.0
    join_s: float = 0.0
    slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class SharedRun:
    """What happened, or would happen.

    Args:
        iterations: those of each job, by name.
        peak_bytes: the most that all jobs held at once.
        makespan_s: when the last job ended.
        device_s: the device's time that each job used.
        levels: `(seconds, bytes of each job)`, at each change.
        num_wrong: how often each job's forecast did not hold.
    """

    iterations: Mapping[str, Sequence[Iteration]]
    peak_bytes: float
    makespan_s: float
    device_s: Mapping[str, float]
    levels: Sequence[tuple[float, Mapping[str, float]]]
    num_wrong: Mapping[str, int]

    def seconds_per_iteration(self, name: str) -> float:
        """Return the time between the ends of a job's iterations, after a start.

        Only those count that ended while every other job was still at work, and not in
        the first third of that time: no job waits before another is behind its share.
        """
        until_s = min(own[-1].end_s for own in self.iterations.values() if own)
        ends = [x.end_s for x in self.iterations[name]]
        ends = [x for x in ends if until_s / 3 <= x <= until_s]
        if len(ends) < 2:
            whole = self.iterations[name]
            return (whole[-1].end_s - whole[0].request_s) / len(whole)
        return (ends[-1] - ends[0]) / (len(ends) - 1)


@dataclass(slots=True)
class _Player:
    """Where a job is; `at_s` counts the seconds of its iteration that are done."""

    job: SimulatedJob
    ready_s: float
    at_s: float = 0.0
    num_done: int = 0

    @property
    def static_bytes(self) -> float:
        """Return what the job holds between iterations by now."""
        return self.job.static_bytes + self.num_done * self.job.grown_bytes

    def next_stop_s(self, point: Point) -> float:
        """Return the position of its next change: of its memory, or of its point."""
        times = self.job.actual.curve.time_s
        stop = self.job.actual.seconds
        if point is Point.FORWARD:
            stop = self.job.actual.forward_s
        later = times[times > self.at_s + _NOT_BEFORE_S]
        return min(float(later[0]), stop) if later.size else stop


class _Simulation:
    def __init__(
        self, mode: Mode, jobs: Sequence[SimulatedJob], budgets: Mapping[float, float]
    ) -> None:
        self.mode = mode
        self.players = {job.name: _Player(job, job.join_s) for job in jobs}
        self.budgets = dict(sorted(budgets.items()))
        self.board = Board(mode, self.budgets.pop(0.0, inf))
        self.now_s, self.look_s, self.peak = 0.0, inf, 0.0
        self.iterations: dict[str, Sequence[Iteration]] = {}
        self.num_wrong: dict[str, int] = {}
        self.device_s: dict[str, float] = {}
        self.levels: list[tuple[float, dict[str, float]]] = []

    def run(self) -> SharedRun:
        while self.players:
            self._arrive()
            _, self.look_s = self.board.open_gates(self.now_s)
            self._record()
            self._advance()
        return SharedRun(
            self.iterations,
            self.peak,
            self.now_s,
            self.device_s,
            self.levels,
            self.num_wrong,
        )

    def _arrive(self) -> None:
        """Let jobs come to their gates, and budgets change."""
        for since_s in [x for x in self.budgets if x <= self.now_s]:
            self.board.budget_bytes = self.budgets.pop(since_s)
        for name, player in self.players.items():
            job = player.job
            if name not in self.board.records:
                if job.join_s > self.now_s:
                    continue
                self.board.join(
                    name,
                    self.now_s,
                    weight=job.weight,
                    max_slowdown=job.max_slowdown,
                    static_bytes=job.static_bytes,
                    forecast=job.believed,
                )
                player.ready_s = self.now_s + job.away_s
            if self._point(name) is Point.AWAY and player.ready_s <= self.now_s:
                self.board.wait(name, Point.WAITS, self.now_s)

    def _record(self) -> None:
        held = {}
        for name, player in self.players.items():
            if name in self.board.records:
                is_on = self._is_begun(name)
                curve = player.job.actual.curve
                at = curve.at(player.at_s + _NOT_BEFORE_S) if is_on else 0.0
                held[name] = player.static_bytes + at
        self.levels.append((self.now_s, held))
        self.peak = max(self.peak, sum(held.values()))

    def _advance(self) -> None:
        """Go to the next change of anything, and let running jobs work until then."""
        moments = [self.look_s, *self.budgets]
        running = [x for x in self.players if self._is_running(x)]
        rates = {x: self._rate(x, len(running)) for x in running}
        for name, player in self.players.items():
            if name in rates:
                left_s = player.next_stop_s(self._point(name)) - player.at_s
                moments.append(self.now_s + max(left_s, 0.0) / rates[name])
            elif player.ready_s > self.now_s:
                moments.append(player.ready_s)
        next_s = min(moments)
        assert next_s < inf, "all jobs wait for each other"
        for name in running:
            self.players[name].at_s += (next_s - self.now_s) * rates[name]
        self.now_s = next_s
        for name in running:
            self._pass_points(name, self.players[name])

    def _pass_points(self, name: str, player: _Player) -> None:
        job = player.job
        if self._point(name) is Point.FORWARD:
            if player.at_s < job.actual.forward_s - _NOT_BEFORE_S:
                return
            if self.mode is Mode.TICK_TOCK:
                self.board.wait(name, Point.WAITS_BACKWARD, self.now_s)
            else:
                self.board.begin_backward(name, self.now_s)
            return
        if player.at_s < job.actual.seconds - _NOT_BEFORE_S:
            return
        self.board.finish(name, self.now_s)
        self.board.retime(name)
        if job.is_watched:
            left_bytes = player.static_bytes + job.grown_bytes
            self.board.observe(name, job.actual, left_bytes, job.grown_bytes)
        player.at_s, player.num_done = 0.0, player.num_done + 1
        player.ready_s = self.now_s + job.away_s
        if player.num_done == job.num_iterations:
            record = self.board.records[name]
            self.iterations[name] = record.iterations
            self.device_s[name] = record.state.device_s
            self.num_wrong[name] = record.num_wrong
            self.board.leave(name, self.now_s)
            del self.players[name]
        elif not job.away_s:  # before others are asked: it may go first again
            self.board.wait(name, Point.WAITS, self.now_s)

    def _point(self, name: str) -> Point:
        record = self.board.records.get(name)
        return Point.AWAY if record is None else record.state.point

    def _is_running(self, name: str) -> bool:
        return self._point(name) in {Point.FORWARD, Point.BACKWARD}

    def _is_begun(self, name: str) -> bool:
        return self._is_running(name) or self._point(name) is Point.WAITS_BACKWARD

    def _rate(self, name: str, num_running: int) -> float:
        return 1.0 if num_running == 1 else 1.0 / self.players[name].job.slowdown


def simulate_jobs(
    mode: Mode,
    jobs: Sequence[SimulatedJob],
    budget_bytes: float | Mapping[float, float] = inf,
) -> SharedRun:
    """Play jobs to their ends.

    Args:
        mode: how they share.
        jobs: the jobs.
        budget_bytes: the most that all may hold; by the time from which it holds, if it
            changes.
    """
    budgets = budget_bytes if isinstance(budget_bytes, Mapping) else {0.0: budget_bytes}
    return _Simulation(mode, jobs, budgets).run()


def alone_s(job: SimulatedJob) -> float:
    """Return the seconds of an iteration of a job that runs alone."""
    run = simulate_jobs(Mode.FREE, [replace(job, join_s=0.0)])
    return run.seconds_per_iteration(job.name)
