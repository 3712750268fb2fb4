"""Play jobs with a fake clock: when each iteration would run, and what they hold.

The gates are the real ones. Jobs that run at the same time slow each other down by a
factor of each job's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isnan, nan
from typing import Final

from hocket.draw.quantity import byte_size
from hocket.sharing.board import Board, Iteration, JobRecord
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
        records: those of each job when it ended, by name.
        levels: `(seconds, bytes of each job)`, at each change.
    """

    records: Mapping[str, JobRecord]
    levels: Sequence[tuple[float, Mapping[str, float]]]

    @property
    def iterations(self) -> Mapping[str, Sequence[Iteration]]:
        """The iterations of each job, by name."""
        return {name: record.iterations for name, record in self.records.items()}

    @property
    def peak_bytes(self) -> float:
        """The most that all jobs held at once."""
        return max(sum(held.values()) for _, held in self.levels)

    @property
    def makespan_s(self) -> float:
        """When the last job ended."""
        return max(own[-1].end_s for own in self.iterations.values())

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
        self.now_s, self.look_s = 0.0, inf
        self.ended: dict[str, JobRecord] = {}
        self.levels: list[tuple[float, dict[str, float]]] = []

    def run(self) -> SharedRun:
        while self.players:
            self._arrive()
            _, self.look_s = self.board.open_gates(self.now_s)
            self._record()
            self._advance()
        return SharedRun(self.ended, self.levels)

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
                waits = self._point(name) is Point.WAITS_BACKWARD
                is_on = self._is_running(name) or waits
                curve = player.job.actual.curve
                at = curve.at(player.at_s + _NOT_BEFORE_S) if is_on else 0.0
                held[name] = player.static_bytes + at
        self.levels.append((self.now_s, held))

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
            self.ended[name] = self.board.records[name]
            self.board.leave(name, self.now_s)
            del self.players[name]
        elif not job.away_s:  # before others are asked: it may go first again
            self.board.wait(name, Point.WAITS, self.now_s)

    def _point(self, name: str) -> Point:
        record = self.board.records.get(name)
        return Point.AWAY if record is None else record.state.point

    def _is_running(self, name: str) -> bool:
        return self._point(name) in {Point.FORWARD, Point.BACKWARD}

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


# `mode="auto"`: predict every mode from what a trial measured, and take the best.
#
# trial    each job alone ─▶ seconds, memory curve      both ─▶ how much they slow
# predict  the same gates, with a fake clock, in every mode
# choose   the largest sum of speeds (time alone / time shared) of those modes that
# hold the budget, and give each job at least what turns would
PREDICTED: Final = (Mode.TURNS, Mode.BUDGET, Mode.LAG, Mode.TICK_TOCK, Mode.FREE)
_NUM_ITERATIONS: Final = 30  # of the slowest job: shares are exact to a twentieth
_MOST_ITERATIONS: Final = 150
_MOST_SLOWDOWN: Final = 10.0  # beyond it, what was measured is noise
_LEAST_OVERLAP: Final = 0.2  # of the iterations, to see how much it was slowed
_TINY_S: Final = 1e-12
_LEAST_GAIN: Final = 1.03  # over turns, which need no trust in forecasts
_SHARE_MARGIN: Final = 0.95


@dataclass(frozen=True, slots=True)
class ModePrediction:
    """What one mode would be.

    Args:
        mode: the mode.
        speeds: the time of an iteration alone over that shared, by job.
        peak_bytes: the most that all jobs hold.
        holds_budget: whether that is within the budget.
        holds_weights: whether every job gets its share of what turns would give to all,
            and its `max_slowdown`.
    """

    mode: Mode
    speeds: Mapping[str, float]
    peak_bytes: float
    holds_budget: bool
    holds_weights: bool

    @property
    def total_speed(self) -> float:
        """Return the sum of speeds: 1 is no gain over turns."""
        return sum(self.speeds.values())


@dataclass(frozen=True, slots=True)
class Choice:
    """The mode that was chosen.

    Args:
        mode: the mode.
        why: one sentence.
        predictions: all modes.
    """

    mode: Mode
    why: str
    predictions: tuple[ModePrediction, ...]


def choose(jobs: Sequence[SimulatedJob], budget_bytes: float = inf) -> Choice:
    """Choose the mode for jobs whose iterations are known.

    Args:
        jobs: each with its iteration alone, and how much it is slowed beside others.
        budget_bytes: the most that all jobs may hold.
    """
    turns = predict(Mode.TURNS, jobs, budget_bytes)
    others = (
        predict(mode, jobs, budget_bytes, turns.total_speed)
        for mode in PREDICTED
        if mode is not Mode.TURNS
    )
    predictions = (turns, *others)
    usable = [x for x in predictions if x.holds_budget and x.holds_weights]
    best = max(usable, key=lambda x: x.total_speed, default=turns)
    slowest = max(job.slowdown for job in jobs)
    if best.total_speed < _LEAST_GAIN * turns.total_speed:
        return Choice(
            Mode.TURNS,
            f"no other mode is {_LEAST_GAIN:.2f} times as fast: beside each other, the "
            f"jobs take up to {slowest:.2f} times as long, as one of them alone "
            "(nearly) fills the device, or as the budget lets them overlap too little",
            predictions,
        )
    return Choice(
        best.mode,
        f"{best.total_speed / turns.total_speed:.2f} times as fast as turns, within "
        f"{byte_size(best.peak_bytes)}; beside each other, the jobs take up to "
        f"{slowest:.2f} times as long",
        predictions,
    )


def predict(
    mode: Mode,
    jobs: Sequence[SimulatedJob],
    budget_bytes: float = inf,
    total_in_turns: float | None = None,
) -> ModePrediction:
    """Predict one mode: play some iterations of each job with a fake clock.

    Args:
        mode: the mode.
        jobs: see `choose`.
        budget_bytes: see `choose`.
        total_in_turns: the sum of speeds in turns, of which each job has its share: 1
            where no job loads data; the mode's own when not given.
    """
    longest_s = max(job.actual.seconds for job in jobs)
    played = []
    for job in jobs:
        number = ceil(_NUM_ITERATIONS * longest_s / max(job.actual.seconds, _TINY_S))
        number = min(number, _MOST_ITERATIONS)
        played.append(replace(job, believed=job.actual, num_iterations=number))
    run = simulate_jobs(mode, played, budget_bytes)
    weights = sum(job.weight for job in jobs)
    speeds = {
        job.name: job.actual.seconds / run.seconds_per_iteration(job.name)
        for job in jobs
    }
    total = sum(speeds.values()) if total_in_turns is None else total_in_turns
    return ModePrediction(
        mode,
        speeds,
        run.peak_bytes,
        run.peak_bytes <= budget_bytes * (1 + 1e-9),
        all(
            speeds[job.name] >= _SHARE_MARGIN * total * job.weight / weights
            and speeds[job.name] * job.max_slowdown >= _SHARE_MARGIN
            for job in jobs
        ),
    )


def slowdowns(
    trial: Mapping[str, Sequence[Iteration]], alone_s: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Return how much longer each job's work takes while another job runs.

    Of the iterations, `own` seconds ran alone and `both` beside another: their work
    alone would take `own + both / slowdown`. Sums over iterations count, as these may
    be uneven.

    Args:
        trial: iterations of a time in which jobs overlapped.
        alone_s: the mean seconds of iterations alone, by job and kind.
    """
    found = {}
    for name, iterations in trial.items():
        others = [x for other, own in trial.items() if other != name for x in own]
        work_s = own_s = both_s = 0.0
        for x in iterations:
            if isnan(mean_s := alone_s[name].get(x.kind, nan)):
                continue
            covered_s = _covered_s(x, others)
            work_s += mean_s
            both_s += covered_s
            own_s += x.end_s - x.start_s - covered_s
        left_s = max(work_s - own_s, both_s / _MOST_SLOWDOWN, _TINY_S)
        overlaps = both_s > _LEAST_OVERLAP * work_s
        found[name] = max(1.0, both_s / left_s) if overlaps else 1.0
    return found


def _covered_s(own: Iteration, others: Sequence[Iteration]) -> float:
    """Return for how long at least one of the others ran."""
    covered_s, until_s = 0.0, own.start_s
    for other in sorted(others, key=lambda x: x.start_s):
        begin_s = max(other.start_s, until_s)
        end_s = min(other.end_s, own.end_s)
        if end_s > begin_s:
            covered_s += end_s - begin_s
            until_s = end_s
    return covered_s
