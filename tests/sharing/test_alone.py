"""What iterations take alone is a mean, by kind; played with a fake clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle, pairwise
from math import inf, isnan, nan
from time import sleep
from typing import Any

import pytest
import torch

import hocket
from hocket.sharing.board import Board, Iteration
from hocket.sharing.forecast import KindTimes, mean_alone_s, slowdown
from hocket.sharing.policy import Mode, Point
from hocket.sharing.report import JobReport
from hocket.sharing.simulate import slowdowns

UNEVEN = (20.0, 20.0, 20.0, 2.0)


def take_turns(
    lasting: Mapping[str, Sequence[float]], until_s: float, limits: Mapping[str, float]
) -> Board:
    """Jobs in turns, whose iterations last as given, over and over."""
    board, now_s = Board(Mode.TURNS), 0.0
    durations = {name: cycle(own) for name, own in lasting.items()}
    for name in lasting:
        board.join(name, now_s, max_slowdown=limits.get(name, inf))
        board.wait(name, Point.WAITS, now_s)
    while now_s < until_s:
        (name,), _ = board.open_gates(now_s)
        now_s += next(durations[name])
        board.finish(name, now_s)
        board.wait(name, Point.WAITS, now_s)
    return board


def test_time_alone_is_a_mean() -> None:
    """Past bug: it was that of the shortest iteration, of 2 s beside three of 20 s."""
    board = take_turns({"a": UNEVEN, "b": (15.0,)}, 20_000.0, {})
    assert board.records["a"].solo_s == pytest.approx(15.5, rel=0.01)
    assert board.records["b"].solo_s == pytest.approx(15.0)


def test_an_uneven_job_with_a_limit_does_not_starve_others() -> None:
    """Past bug: in turns one that may be 3 times slower was urgent for ever."""
    board = take_turns({"a": UNEVEN, "b": (15.0,)}, 20_000.0, {"a": 3.0})
    used = [board.records[name].state.device_s for name in "ab"]
    assert used[0] == pytest.approx(used[1], rel=0.05)
    assert board.records["a"].slowdown(20_000.0) == pytest.approx(2.0, rel=0.05)


def test_a_limit_is_by_what_iterations_take_now() -> None:
    """A job whose iterations become ten times as long is not urgent for ever."""
    later = {"a": (*(1.0,) * 100, *(10.0,) * 400), "b": (1.0,)}
    board = take_turns(later, 4000.0, {"a": 1.5})
    starts = [x.start_s for x in board.records["b"].iterations]
    assert max(b - a for a, b in pairwise(starts)) < 300.0
    assert starts[-1] > 3900.0


def test_kinds_are_compared_with_their_own() -> None:
    """Of the first iteration of a kind, and of watched ones, nothing is kept."""
    board = Board(Mode.TURNS)
    board.join("a", 0.0, max_slowdown=1.5)
    now_s = 0.0
    for kind, seconds, is_watched in (
        *(("train", 9.0, True), ("train", 8.0, True), ("train", 4.0, False)),
        *(("test", 3.0, False), ("test", 1.0, False), ("train", 6.0, False)),
    ):
        board.wait("a", Point.WAITS, now_s)
        board.open_gates(now_s)
        now_s += seconds
        board.finish("a", now_s, kind=kind, is_watched=is_watched)
    record = board.records["a"]
    assert record.alone_s == pytest.approx(
        {"": nan, "train": 5.0, "test": 1.0}, nan_ok=True
    )
    assert record.solo_s == pytest.approx((4 * 5.0 + 2 * 1.0) / 6)
    assert record.slowdown(now_s) == pytest.approx(1.0)  # it was always alone


def test_what_never_ran_alone_is_unknown() -> None:
    """A kind without an iteration alone counts in no mean."""
    never = KindTimes()
    never.ran_beside(5.0)
    assert isnan(never.mean_s)
    assert isnan(mean_alone_s([never]))
    seen = KindTimes()
    for seconds in (9.0, 2.0):
        seen.ran_alone(seconds, seconds + 1, is_rough=False)
    assert mean_alone_s([never, seen]) == 2.0
    assert slowdown([never, seen], 1.0) == pytest.approx(4.0 / 2.0)
    assert slowdown([never], 1.0) == 1.0


def test_a_slow_start_is_no_slowdown() -> None:
    """Past bug: after a first iteration of 100 s a job was urgent for 200 of 1 s."""
    times = KindTimes()
    times.ran_alone(100.0, 100.0, is_rough=True)
    for _ in range(4):
        times.ran_alone(1.0, 1.0, is_rough=False)
    assert slowdown([times], 0.0) == 1.0
    for _ in range(10):
        times.ran_beside(2.0)
    assert slowdown([times], 0.0) == pytest.approx(24.0 / 14.0)


def ran(start_s: float, end_s: float, kind: str = "") -> Iteration:
    """An iteration beside another job."""
    return Iteration(0, start_s, start_s, nan, end_s, 0.0, ran_alone=False, kind=kind)


def test_uneven_jobs_that_do_not_slow_each_other() -> None:
    """Past bug: against the shortest iteration, each one looked slowed."""
    own, now_s = [], 0.0
    for seconds in UNEVEN * 2:
        own.append(ran(now_s, now_s + seconds))
        now_s += seconds
    trial = {"a": own, "b": [ran(15.0 * i, 15.0 * (i + 1)) for i in range(9)]}
    found = slowdowns(trial, {"a": {"": 15.5}, "b": {"": 15.0}})
    assert found == pytest.approx({"a": 1.0, "b": 1.0})


def test_the_speed_is_that_of_comparable_iterations() -> None:
    """Those whose kind never ran alone count neither alone nor shared."""
    kinds = ["train", "train", "test", "train", "other"]
    ends = [10.0, 20.0, 21.0, 31.0, 99.0]
    report = JobReport(
        name="a",
        weight=1.0,
        losses=(),
        iterations=tuple(
            ran(end - 1, end, kind) for kind, end in zip(kinds, ends, strict=True)
        ),
        first_shared=0,
        until_s=inf,
        alone_s={"train": 5.0, "test": 0.5, "other": nan},
        static_bytes=0.0,
        forecast=None,
        num_wrong=0,
        error=None,
        is_hung=False,
    )
    assert report.solo_s == pytest.approx(10.5 / 3)
    assert report.shared_s == pytest.approx(21.0 / 3)
    assert report.speed == pytest.approx(0.5)


def marks_kinds(job: hocket.JobContext) -> tuple[Any, Any]:
    """A job that names every fourth iteration."""

    def step(number: int) -> None:
        assert not job.kind
        with job.forward():
            held = torch.ones(64)
        with job.backward():
            del held
        if number % 4 == 3:
            job.kind = "fourth"

    return step, range(16)


@pytest.mark.parametrize("processes", [False, True])
def test_a_job_names_the_kinds_of_its_iterations(*, processes: bool) -> None:
    """For one iteration; and from a process of its own, too."""
    jobs = [hocket.Job("a", marks_kinds)]
    report = hocket.share(jobs, mode="turns", device="cpu", processes=processes)
    report.check()
    kinds = [x.kind for x in report["a"].iterations]
    assert kinds == [*("",) * 3, "fourth"] * 4
    assert report["a"].alone_s.keys() == {"", "fourth"}


def test_auto_overlaps_uneven_jobs() -> None:
    """Every fourth iteration of one is short; neither slows the other.

    Past bug: beside its shortest iteration each other one looked slowed, and auto took
    turns.
    """

    def make(lasting: tuple[float, ...], job: hocket.JobContext) -> tuple[Any, Any]:
        def step(number: int) -> None:
            seconds = lasting[number % len(lasting)]
            with job.forward():
                held = torch.ones(1024)
                sleep(seconds / 3)
            with job.backward():
                sleep(2 * seconds / 3)
                del held

        return step, range(60)

    jobs = [
        hocket.Job("a", partial(make, (0.04, 0.04, 0.04, 0.004))),
        hocket.Job("b", partial(make, (0.03,))),
    ]
    report = hocket.share(jobs, device="cpu")
    report.check()
    assert report.mode in {Mode.BUDGET, Mode.LAG, Mode.FREE}
    assert report["a"].solo_s == pytest.approx(0.031, rel=0.25)
    assert report.total_speed > 1.3
