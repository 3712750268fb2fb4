"""The rule of sharing, played with a fake clock."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Final

import pytest

from hocket.sharing.board import Board
from hocket.sharing.forecast import Forecast
from hocket.sharing.policy import Decision, JobState, Mode, Point, decide
from hocket.sharing.simulate import SharedRun, SimulatedJob, simulate_jobs
from tests.sharing.support.forecasts import any_forecast, needed, ramp

NUM_PAIRS: Final = 1000
ADMITTING: Final = (Mode.TURNS, Mode.LAG, Mode.BUDGET)
EVERY: Final = (*ADMITTING, Mode.TICK_TOCK, Mode.FREE)
ROUNDING: Final = 1e-6


def any_pair(rng: random.Random) -> list[SimulatedJob]:
    """Two jobs with known forecasts, which do not slow each other down."""
    jobs = []
    for name in "ab":
        actual = any_forecast(rng)
        jobs.append(
            SimulatedJob(
                name,
                actual,
                rng.randint(1, 3),
                believed=actual,
                weight=rng.choice([1.0, 2.0]),
                static_bytes=rng.uniform(0.0, 2.0),
                join_s=rng.choice([0.0, rng.uniform(0.0, 3.0)]),
            )
        )
    return jobs


def test_random_pairs_hold_their_budget_and_overlap_saves_time() -> None:
    """1,000 random pairs under random budgets: what they hold at once always fits.

    All end, so nothing is stuck. Where neither job slows the other, admission by the
    curves is never slower than turns; a lag, by at most half of the longest iteration,
    for which the shorter job may wait at first.
    """
    rng = random.Random(1)
    for _ in range(NUM_PAIRS):
        jobs = any_pair(rng)
        budget = needed(jobs) * rng.uniform(1.0, 1.6)
        runs = {mode: simulate_jobs(mode, jobs, budget) for mode in ADMITTING}
        for run in runs.values():
            assert run.peak_bytes <= budget + ROUNDING
            for job in jobs:
                assert len(run.iterations[job.name]) == job.num_iterations
        turns_s = runs[Mode.TURNS].makespan_s
        assert runs[Mode.BUDGET].makespan_s <= turns_s + ROUNDING
        longest_s = max(job.actual.seconds for job in jobs)
        assert runs[Mode.LAG].makespan_s <= turns_s + longest_s / 2 + ROUNDING


def test_random_pairs_whose_forecasts_are_wrong() -> None:
    """1,000 random pairs; forwards and backwards take up to 10 % more or less.

    The makespan is at most that of turns and the forecasts' error, in a lag with half
    of the longest iteration. The budget is exceeded only by iterations that were
    admitted before one of each job had been seen.
    """
    rng = random.Random(2)
    for _ in range(NUM_PAIRS):
        jobs = any_pair(rng)
        budget = needed(jobs) * rng.uniform(1.0, 1.6)
        wrong = [replace(job, believed=misjudged(job.actual, rng)) for job in jobs]
        error_s = sum(
            abs(known.forward_s - job.actual.forward_s)
            + abs(known.backward_s - job.actual.backward_s)
            for job in wrong
            if (known := job.believed) is not None
        )
        most_s = simulate_jobs(Mode.TURNS, wrong, budget).makespan_s + error_s
        lag_s = max(job.actual.seconds for job in jobs) / 2
        for mode, more_s in ((Mode.BUDGET, 0.0), (Mode.LAG, lag_s)):
            run = simulate_jobs(mode, wrong, budget)
            assert run.makespan_s <= most_s + more_s + ROUNDING
            seen_s = max(own[0].end_s for own in run.iterations.values())
            for time_s, held in run.levels:
                if time_s > seen_s + ROUNDING:
                    assert sum(held.values()) <= budget + ROUNDING


def misjudged(actual: Forecast, rng: random.Random) -> Forecast:
    """A forecast whose seconds are off by up to 10 %."""
    return actual.retimed(
        actual.forward_s * rng.uniform(0.9, 1.1),
        actual.backward_s * rng.uniform(0.9, 1.1),
    )


@pytest.mark.parametrize(
    ("mode", "most"),
    [(Mode.LAG, 1.35), (Mode.TICK_TOCK, 1.55), (Mode.FREE, 2.0), (Mode.TURNS, 1.0)],
)
def test_peaks_of_linear_ramps(mode: Mode, most: float) -> None:
    """Two equal jobs: half a lag needs 1.25 P, strict alternation 1.5 P, none 2 P."""
    jobs = [SimulatedJob(name, ramp(1.0), 8, believed=ramp(1.0)) for name in ("a", "b")]
    run = simulate_jobs(mode, jobs)
    assert most - 0.1 <= run.peak_bytes <= most + ROUNDING


def test_equal_jobs_wait_once_in_lag_and_each_time_in_tick_tock() -> None:
    """A lag is free for jobs of one period; strict waves take 4 units, and not 3."""
    jobs = [SimulatedJob(name, ramp(1.0), 8, believed=ramp(1.0)) for name in ("a", "b")]
    lag = simulate_jobs(Mode.LAG, jobs)
    delays = [x.delay_s for own in lag.iterations.values() for x in own]
    assert sum(delays) == pytest.approx(1.5)
    assert lag.seconds_per_iteration("b") == pytest.approx(3.0)
    waves = simulate_jobs(Mode.TICK_TOCK, jobs)
    assert waves.seconds_per_iteration("b") == pytest.approx(4.0)


def test_the_slower_job_sets_the_lags_period() -> None:
    """The shorter job starts in the middle of each iteration of the longer one."""
    jobs = [
        SimulatedJob("a", ramp(1.0), 6, believed=ramp(1.0)),
        SimulatedJob("b", ramp(1.0, forward_s=0.3), 6, believed=ramp(1.0)),
    ]
    run = simulate_jobs(Mode.LAG, jobs)
    assert run.seconds_per_iteration("a") == pytest.approx(3.0)
    starts = {name: [x.start_s for x in own] for name, own in run.iterations.items()}
    gaps = [b - a for a, b in zip(starts["a"], starts["b"], strict=True)]
    assert gaps == pytest.approx([1.5] * 6, abs=1e-6)


def used_s(run: SharedRun, until_s: float) -> dict[str, float]:
    """The device's time of each job until then; what overlaps is divided evenly."""
    spans = [
        (name, x.start_s, min(x.end_s, until_s))
        for name, own in run.iterations.items()
        for x in own
    ]
    moments = sorted({t for _, *both in spans for t in both if t <= until_s})
    used = dict.fromkeys(run.iterations, 0.0)
    for begin_s, end_s in pairwise(moments):
        running = [name for name, start, end in spans if start <= begin_s < end]
        for name in running:
            used[name] += (end_s - begin_s) / len(running)
    return used


@pytest.mark.parametrize("weights", [(2.0, 1.0), (1.0, 5.0), (1.0, 1.0)])
@pytest.mark.parametrize("away", [0.0, 0.1, 0.8])
def test_weights_are_shares_of_device_time(
    weights: tuple[float, float], away: float
) -> None:
    """While both are there, the used time differs from the shares by an iteration.

    Also where jobs load data between iterations: another job that waits meanwhile does
    not go before its turn.
    """
    rng = random.Random(3)
    for _ in range(4):
        jobs = [
            SimulatedJob(name, actual, 60, weight, actual, away_s=away * actual.seconds)
            for name, weight in zip("ab", weights, strict=True)
            for actual in [any_forecast(rng)]
        ]
        run = simulate_jobs(Mode.TURNS, jobs)
        a, b = in_shares(run, jobs)
        assert abs(a - b) <= 2 * longest_share(jobs)


def in_shares(run: SharedRun, jobs: list[SimulatedJob]) -> list[float]:
    """The device's time of each job while all are there, over its weight."""
    used = used_s(run, min(own[-1].end_s for own in run.iterations.values()))
    return [used[job.name] / job.weight for job in jobs]


def longest_share(jobs: list[SimulatedJob]) -> float:
    """The longest iteration, over its job's weight."""
    return max(job.actual.seconds * job.slowdown / job.weight for job in jobs)


@pytest.mark.parametrize("weights", [(2.0, 1.0), (1.0, 5.0), (1.0, 1.0), (3.0, 2.0, 1)])
@pytest.mark.parametrize("room", [1.0, 1.3, 9.0])
def test_weights_are_shares_of_device_time_within_a_budget(
    weights: tuple[float, ...], room: float
) -> None:
    """However much of the jobs fits together, and however much they slow each other.

    An iteration more than its share is allowed to a job, and one may be under way.
    """
    rng = random.Random(5)
    for slowdown in (1.0, 1.6):
        jobs = [
            SimulatedJob(name, actual, 80, weight, actual, slowdown=slowdown)
            for name, weight in zip("abc", weights, strict=False)
            for actual in [any_forecast(rng)]
        ]
        budget = needed(jobs) * room
        run = simulate_jobs(Mode.BUDGET, jobs, budget)
        if slowdown == 1.0:  # else the forecasts are too short at first
            assert run.peak_bytes <= budget + ROUNDING
        shares = in_shares(run, jobs)
        assert max(shares) - min(shares) <= 2 * longest_share(jobs) + ROUNDING


@pytest.mark.parametrize("room", [1.0, 3.0])
def test_jobs_that_load_data_do_not_alternate_within_a_budget(room: float) -> None:
    """Weights are shares still, of the time in which both jobs are there.

    Loading takes a tenth of an iteration; jobs that alternate differ by a half.
    """
    jobs = [
        SimulatedJob(name, ramp(1.0), 60, weight, ramp(1.0), away_s=0.3)
        for name, weight in (("a", 2.0), ("b", 1.0))
    ]
    run = simulate_jobs(Mode.BUDGET, jobs, room)
    assert run.peak_bytes <= room + ROUNDING
    a, b = in_shares(run, jobs)
    assert a == pytest.approx(b, rel=0.2)


def test_no_job_waits_for_one_without_a_claim() -> None:
    """A job that loads data half of the time uses less than its share, and stays so.

    With room for both, the other one runs on as fast as alone.
    """
    loads = SimulatedJob("a", ramp(1.0), 30, 1.0, ramp(1.0), away_s=2.9)
    other = SimulatedJob("b", ramp(1.0), 60, 1.0, ramp(1.0))
    run = simulate_jobs(Mode.BUDGET, [loads, other], 3.0)
    assert sum(x.delay_s for x in run.iterations["b"]) == pytest.approx(0.0)
    assert sum(x.delay_s for x in run.iterations["a"]) == pytest.approx(0.0)


def test_a_job_with_a_hundredth_of_the_weight_is_not_starved() -> None:
    """It runs to its end while the others do, in every mode that looks at weights."""
    for mode in (Mode.TURNS, Mode.BUDGET):
        jobs = [
            SimulatedJob("a", ramp(1.0), 300, 100.0, ramp(1.0)),
            SimulatedJob("b", ramp(0.5), 300, 100.0, ramp(0.5)),
            SimulatedJob("c", ramp(0.8), 3, 1.0, ramp(0.8)),
        ]
        run = simulate_jobs(mode, jobs, 1.6)
        assert run.iterations["c"][-1].end_s < run.makespan_s * 0.9


def test_others_wait_a_little_for_a_job_that_loads_data() -> None:
    """Twice as long as it loaded before; not at all if it loads longer than it trains.

    Nor if it is ahead of its share.
    """
    loads = JobState("a", 2.0, point_s=5.0, forecast=ramp(1.0), away_s=1.0)
    waits = JobState("b", 1.0, point=Point.WAITS, device_s=1.0)
    assert decide(Mode.TURNS, [loads, waits], inf, 6.9) == Decision((), 7.0)
    for late in (
        [replace(loads, point_s=4.8), waits],
        [replace(loads, away_s=3.5), waits],
        [replace(loads, device_s=2.5), waits],
        [loads, replace(waits, is_urgent=True)],
    ):
        assert decide(Mode.TURNS, late, inf, 6.9).starts == ("b",)


@pytest.mark.parametrize("mode", ADMITTING)
def test_max_slowdown_is_honoured(mode: Mode) -> None:
    """A job that may be at most 1.25 times slower is, with one other or with three.

    The other jobs would slow it down by half if they ran beside it all the time.
    """
    first = SimulatedJob(
        "a", ramp(1.0), 40, believed=ramp(1.0), max_slowdown=1.25, slowdown=1.5
    )
    others = [
        SimulatedJob(x, ramp(0.5), 30, 2.0, believed=ramp(0.5), slowdown=1.5)
        for x in "bcd"
    ]
    run = simulate_jobs(mode, [first, *others], 2.0)
    alone_s = 40 * 3.0
    assert run.iterations["a"][-1].end_s <= alone_s * 1.25 + 2 * 3.0 * 1.5


def test_loading_data_is_no_slowdown() -> None:
    """Past bug: a job that loads data was urgent for ever, and the others waited."""
    board = Board(Mode.BUDGET)
    board.join("a", 0.0, max_slowdown=1.5, forecast=ramp(1.0))
    for start_s in (100.0, 200.0, 300.0):
        board.wait("a", Point.WAITS, start_s)
        board.open_gates(start_s)
        assert not board.records["a"].state.is_urgent
        board.finish("a", start_s + 3.0)
    board.wait("a", Point.WAITS, 400.0)
    assert board.records["a"].slowdown(401.5) == pytest.approx(10.5 / 9)


def test_a_large_iteration_is_not_overtaken_for_ever() -> None:
    """Small jobs that always fit do not keep out one that fits only between them."""
    small = [
        SimulatedJob(x, ramp(0.4, forward_s=s), 50, believed=ramp(0.4, forward_s=s))
        for x, s in (("a", 0.30), ("b", 0.41))
    ]
    large = SimulatedJob("c", ramp(1.0), 3, believed=ramp(1.0))
    run = simulate_jobs(Mode.BUDGET, [*small, large], 1.0)
    assert run.peak_bytes <= 1.0 + ROUNDING
    assert run.iterations["c"][-1].end_s < run.makespan_s * 0.75


@pytest.mark.parametrize("mode", EVERY)
def test_jobs_come_and_go(mode: Mode) -> None:
    """Five jobs of all lengths, some late, with pauses: all end, in every mode."""
    rng = random.Random(4)
    for _ in range(20):
        jobs = [
            SimulatedJob(
                str(i),
                any_forecast(rng),
                rng.randint(1, 9),
                join_s=rng.choice([0.0, rng.uniform(0.0, 20.0)]),
                away_s=rng.choice([0.0, 0.5]),
                is_watched=True,
            )
            for i in range(5)
        ]
        run = simulate_jobs(mode, jobs, needed(jobs) * 1.2)
        for job in jobs:
            assert len(run.iterations[job.name]) == job.num_iterations


def test_a_budget_may_change() -> None:
    """With little memory jobs take turns, with more they overlap, then turns again."""
    jobs = [SimulatedJob(x, ramp(1.0), 12, believed=ramp(1.0)) for x in ("a", "b")]
    run = simulate_jobs(Mode.BUDGET, jobs, {0.0: 1.0, 20.0: 2.0, 30.0: 1.0})
    tight = [sum(held.values()) for time_s, held in run.levels if time_s < 20]
    wide = [sum(held.values()) for time_s, held in run.levels if 20 <= time_s < 30]
    assert max(tight) <= 1.0 + ROUNDING
    assert max(wide) > 1.2
    after = [sum(held.values()) for time_s, held in run.levels if time_s > 33]
    assert max(after) <= 1.0 + ROUNDING


def test_a_wrong_forecast_runs_alone_until_it_holds() -> None:
    """A job that holds twice what it said runs alone once, and then as it is.

    Only the iterations that were started by the wrong forecast are above the budget.
    """
    lying = SimulatedJob("a", ramp(2.0), 6, believed=ramp(1.0), is_watched=True)
    honest = SimulatedJob("b", ramp(1.0), 6, believed=ramp(1.0), is_watched=True)
    run = simulate_jobs(Mode.BUDGET, [lying, honest], 2.25)
    assert {x: run.records[x].num_wrong for x in "ab"} == {"a": 1, "b": 0}
    first = run.iterations["a"][0]
    second = run.iterations["a"][1]
    assert second.ran_alone
    assert not first.ran_alone
    above = [time_s for time_s, held in run.levels if sum(held.values()) > 2.25]
    assert all(time_s <= first.end_s for time_s in above)


@pytest.mark.parametrize("mode", ADMITTING)
def test_unknown_jobs_run_alone_first(mode: Mode) -> None:
    """Without a forecast, the first iteration of each job overlaps with nothing."""
    jobs = [SimulatedJob(x, ramp(1.0), 5, is_watched=True) for x in ("a", "b")]
    run = simulate_jobs(mode, jobs, 1.5)
    assert all(own[0].ran_alone for own in run.iterations.values())
    assert run.peak_bytes <= 1.5 + ROUNDING


@pytest.mark.parametrize("mode", [Mode.LAG, Mode.TICK_TOCK])
def test_no_job_catches_up_when_the_mode_changes(mode: Mode) -> None:
    """Past bug: many short turns let the other job go first for many long ones."""
    board = Board(Mode.TURNS)
    for name in ("short", "long"):
        board.join(name, 0.0, forecast=ramp(1.0))
    for now_s in range(100):
        board.wait("short", Point.WAITS, float(now_s))
        board.open_gates(float(now_s))
        board.finish("short", now_s + 0.5)
    board.switch(mode)
    board.wait("short", Point.WAITS, 100.0)
    board.open_gates(100.0)
    assert board.records["short"].state.point is Point.FORWARD


def test_one_job_never_waits() -> None:
    """In every mode, a job without another beside it runs as fast as alone."""
    for mode in EVERY:
        run = simulate_jobs(mode, [SimulatedJob("a", ramp(1.0), 5)], inf)
        assert run.makespan_s == pytest.approx(15.0)
        assert all(x.delay_s == 0 for x in run.iterations["a"])


def test_a_slower_neighbour_stretches_what_overlaps() -> None:
    """Jobs that slow each other by two gain nothing by running at the same time."""
    jobs = [SimulatedJob(x, ramp(1.0), 5, slowdown=2.0) for x in ("a", "b")]
    free = simulate_jobs(Mode.FREE, jobs)
    turns = simulate_jobs(Mode.TURNS, [replace(x, slowdown=1.0) for x in jobs])
    assert free.makespan_s == pytest.approx(turns.makespan_s)


def test_two_jobs_that_hold_all_of_the_budget_for_two_thirds_of_an_iteration() -> None:
    """The numbers of docs/explanation/sharing.md."""
    held = Forecast.of_changes(1.0, 2.0, [0.0, 2.0], [100, -100])
    jobs = [SimulatedJob(name, held, 5, believed=held) for name in ("a", "b")]
    assert simulate_jobs(Mode.TURNS, jobs).makespan_s == pytest.approx(30.0)
    run = simulate_jobs(Mode.BUDGET, jobs, budget_bytes=100)
    assert run.makespan_s == pytest.approx(21.0)
    assert run.peak_bytes == 100.0
