"""`mode="auto"`: predict every mode from what a trial measured, and take the best.

trial    each job alone ─▶ seconds, memory curve      both ─▶ how much they slow
predict  the same gates, with a fake clock, in every mode
choose   the largest sum of speeds (time alone / time shared) of those modes that
hold the budget, and give each job at least what turns would
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isnan, nan
from typing import Final

from hocket.draw.quantity import byte_size
from hocket.sharing.board import Iteration
from hocket.sharing.policy import Mode
from hocket.sharing.simulate import SimulatedJob, simulate_jobs

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
