"""A job that keeps tensors from iteration to iteration is counted, and limited."""

from __future__ import annotations

import random
from functools import partial
from time import sleep
from typing import Any, Final

import pytest
import torch

import hocket
from hocket.errors import NoMemoryError
from hocket.sharing.board import Board, Growth
from hocket.sharing.forecast import Forecast
from hocket.sharing.policy import Mode
from hocket.sharing.simulate import SimulatedJob, simulate_jobs

ITERATION: Final = Forecast.of_changes(1.0, 2.0, [0.0], [100.0])
KIB: Final = 1024


@pytest.mark.parametrize("mode", [Mode.BUDGET, Mode.LAG])
def test_a_job_that_grows_slowly_stays_within_the_budget(mode: Mode) -> None:
    """Both overlap while they fit together, and then take turns: 5 more each time.

    What they hold is never above the budget, which the last iteration needs whole.
    """
    leak = SimulatedJob("a", ITERATION, 51, is_watched=True, grown_bytes=5.0)
    other = SimulatedJob("b", ITERATION, 51, is_watched=True)
    run = simulate_jobs(mode, [leak, other], 350.0)
    assert run.peak_bytes == pytest.approx(350.0)
    alone = [x.ran_alone for x in run.iterations["a"]]
    assert not any(alone[2:28])
    assert all(alone[32:])
    assert {x: run.records[x].num_wrong for x in "ab"} == {"a": 0, "b": 0}


def test_jobs_that_no_longer_fit_alone_take_turns() -> None:
    """Also where their peaks would not meet: what they keep is above the budget."""
    late = Forecast.of_changes(1.0, 1.0, [0.0, 1.0, 1.5], [0.0, 100.0, -100.0])
    jobs = [SimulatedJob(name, late, 20, is_watched=True) for name in "ab"]
    for budget, overlap in ((150.0, True), (50.0, False)):
        run = simulate_jobs(Mode.BUDGET, jobs, budget)
        later = [x for own in run.iterations.values() for x in own[4:-2]]
        assert all(x.ran_alone != overlap for x in later)


def test_a_job_that_grows_by_more_than_forecast_runs_alone() -> None:
    """Until it has grown by as much as was expected of it."""
    board = Board(Mode.BUDGET, 1e6)
    board.join("a", 0.0)
    state = board.records["a"].state
    seen: list[tuple[bool, float]] = []
    for grown in (0.0, 0.0, 50.0, 50.0, 0.0, 0.0):
        board.observe("a", ITERATION, 10.0, grown)
        seen.append((state.is_trusted, state.static_bytes))
        board.records["a"].num_seen -= 1  # watched without a break
    assert [trusted for trusted, _ in seen] == [True, True, False, False, True, True]
    assert board.records["a"].num_wrong == 2
    assert state.static_bytes == 110.0


@pytest.mark.parametrize("period", range(2, 9))
def test_what_comes_and_goes_is_no_growth(period: int) -> None:
    """Gradients that are accumulated over iterations, looked at in any of these.

    However often that is, they count at most once; and no look is a long one.
    """
    rng = random.Random(period)
    cycle = [1e6, *[0.0] * (period - 2), -1e6]
    growth, at = Growth(1e7), 0
    for _ in range(200):
        for number in range(20):
            num_unseen = rng.randint(1, 50) if number == 0 else 0
            at += num_unseen + 1
            growth.see(cycle[at % period], num_unseen)
            assert 1e7 <= growth.static_bytes <= 1.1e7
            if not growth.must_watch(1e6):
                break
        assert number < 6


def test_growth_is_watched_until_it_ends() -> None:
    """A leak counts byte by byte, and a buffer that is emptied no longer."""
    growth = Growth(1e6)
    for number in range(100):
        growth.see(2e3 + number % 3)
        assert growth.must_watch(1e5)
    assert growth.static_bytes == 1e6 + sum(2e3 + i % 3 for i in range(100))
    growth.see(-growth.static_bytes + 1.2e6)
    for _ in range(4):
        growth.see(0.0)
    assert not growth.must_watch(1e5)
    growth.see(0.0, num_unseen=200)
    assert growth.static_bytes == pytest.approx(1.2e6)
    slow = Growth(1e9)
    slow.see(512.0)  # a loss that is kept on a GPU
    assert not slow.must_watch(0.0)


def keeps(
    kib: int, num: int, since: int, job: hocket.JobContext, least_s: float = 0.0
) -> tuple[Any, range]:
    """A job that keeps losses with their graphs from some iteration on."""
    weights = torch.ones(256 * kib, requires_grad=True)
    kept: list[Any] = []

    def step(number: int) -> float:
        with job.forward():
            loss = (weights * 2).exp().sum()  # exp keeps its result
            sleep(least_s)
        with job.backward():
            if number >= since:
                kept.append(loss)
            else:
                del loss
        return float(number)

    return step, range(num)


@pytest.mark.parametrize("mode", ["turns", "budget"])
def test_a_leak_ends_its_own_job(mode: str) -> None:
    """By its own limit, with the numbers; the other job goes on to its end.

    Each iteration keeps 64 KiB, and the limit is 2 MiB: it ends when it has to. A leak
    that begins later is seen by the next look, after 50 iterations.
    """
    limit = 2048 * KIB
    jobs = [
        hocket.Job("early", partial(keeps, 64, 300, 0), memory_bytes=limit),
        hocket.Job("late", partial(keeps, 64, 300, 20), memory_bytes=limit),
        hocket.Job("other", partial(keeps, 64, 120, 300), memory_bytes=limit),
    ]
    report = hocket.share(jobs, mode=mode, device="cpu")
    early, late, other = report.jobs
    assert isinstance(early.error, NoMemoryError)
    assert early.error.actual_bytes - limit <= 130 * KIB
    assert 26 <= len(early.losses) <= 31
    assert "KiB more than after the one before" in str(early.error)
    assert "may hold memory_bytes=2,097,152 (2 MiB): use smaller" in str(early.error)
    assert isinstance(late.error, NoMemoryError)
    assert 50 < len(late.losses) < 90
    assert other.error is None
    assert len(other.losses) == 120
    assert "job 'early' came to hold" in str(report)


def test_a_leak_counts_in_the_budget() -> None:
    """What all hold is what the growing job has kept, and the report says so.

    Also where it runs many iterations in the turns at first, in which it was not
    counted. (Iterations are long beside what a busy machine delays them by: turns are
    shares of time, and all must fit when the turns at first end.)
    """
    report = hocket.share(
        [
            hocket.Job("a", partial(keeps, 64, 60, 0, least_s=0.004)),
            hocket.Job("b", partial(keeps, 64, 60, 60, least_s=0.004)),
        ],
        mode="budget",
        memory_bytes=2048 * KIB,
        device="cpu",
    )
    report.check()
    assert report["a"].static_bytes == pytest.approx(60 * 64 * KIB, rel=0.1)
    assert report["b"].static_bytes == pytest.approx(64 * KIB, rel=0.2)
    own = report["a"].iterations[-20:]
    assert all(x.ran_alone for x in own)  # it no longer fits beside the other
