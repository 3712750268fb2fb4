"""What the plain loop would do, each way to run it does, or refuses by name.

A cell is a case and a way to run it. All weights, buffers and losses, the loss in
evaluation mode, and what the script's own functions see are those of the plain loop to
1e-10; or an error of hocket's names what it refuses. Of a cell that is open no longer
as its case says, the summary tells: change the case.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final
from zlib import crc32

import pytest
import torch

from tests.conformance.cases import CASES
from tests.conformance.script import WAYS, Verdict
from tests.conformance.ways import Outcome, run
from tests.conformance.workers import run_on_two
from tests.run.support.worker_pool import WorkerPool

MOST_REFUSED: Final = 12  # of 60 cases
STRICT: Final = True  # whether a cell that is no longer open must be changed
MAIN: Final = ("own-1", "own-2", "seq-1", "seq-2")
LONG: Final = {"2bw"}  # as WPipe, whose stages have two delays
QUICK: Final = "temperature"  # the case of `make quick`
# `make test` runs a case with an own forward on one worker and on two, as a Sequential
# on one of both and in one of the ways that are alike, by turns; and in all that give
# something else. `make test-long` runs the others.
TURNS: Final = ("seq-1", "seq-2")
ALIKE: Final = ("teacher", "freeze", "wpipe")
CELLS: Final = {
    way: [name for name, found in CASES.items() if found.verdict(way).kind != "none"]
    for way in WAYS
}
ON_TWO: Final = ("own-2", "seq-2")


def cells(ways: Iterable[str]) -> list[Any]:
    """The cases of some ways, as parameters of a test."""
    return [
        pytest.param(name, way, marks=marks_of(name, way))
        for way in ways
        for name in CELLS[way]
    ]


def marks_of(name: str, way: str) -> list[pytest.MarkDecorator]:
    """One case is run quickly in each way; of the others, some take long."""
    if name == QUICK and way not in LONG:
        return [pytest.mark.quick]
    return [pytest.mark.long] if is_long(name, way) else []


def is_long(name: str, way: str) -> bool:
    """Whether a cell is left to `make test-long`: the name of its case says whose turn.

    But for 2BW, cells with a verdict that none of the case's `MAIN` ones has never are.
    """
    case, number = CASES[name], crc32(name.encode())
    main = {case.verdict(x) for x in MAIN}
    if way in TURNS:
        return len(main) == 1 and way == TURNS[number % 2]
    if way in ALIKE and case.verdict(way) in main:
        ways = [x for x in ALIKE if name in CELLS[x]]
        return ways[number // 2 % len(ways)] != way
    return way in LONG


def check(verdict: Verdict, outcome: Outcome) -> None:
    """Compare what came with what must come."""
    is_equal = not outcome.error and outcome.worst <= verdict.tolerance
    if verdict.kind == "equal":
        assert is_equal, str(outcome)
    elif verdict.kind == "refused" and (STRICT or not is_equal):
        assert outcome.is_ours, str(outcome) or "it is not refused"
        assert verdict.text in outcome.error
    elif is_equal or not is_still_so(verdict.error, outcome.error):
        assert not STRICT, f"no longer so: {outcome}"
        pytest.xfail(f"no longer open as its case says: {outcome}")


def is_still_so(known: str, raised: str) -> bool:
    """Whether the error that a case tells of comes, or none where it tells of none."""
    return known in raised if known else not raised


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("name", "way"), cells(x for x in WAYS if x not in ON_TWO))
def test_on_one_worker(name: str, way: str) -> None:
    """As the plain loop, or refused by name."""
    torch.set_num_threads(1)
    check(CASES[name].verdict(way), run(CASES[name], way))


@pytest.mark.timeout(180)
@pytest.mark.xdist_group("conformance on two workers")
@pytest.mark.parametrize(("name", "way"), cells(ON_TWO))
def test_on_two_workers(two_workers: WorkerPool, name: str, way: str) -> None:
    """As the plain loop, or refused by name."""
    check(CASES[name].verdict(way), run_on_two(two_workers, name, way))


def test_few_cases_are_refused() -> None:
    """A refusal is the second choice: some way trains as the plain loop does."""
    kinds = {name: {x.verdict(way).kind for way in MAIN} for name, x in CASES.items()}
    refused = [
        name for name, found in kinds.items() if {*found} - {"none"} == {"refused"}
    ]
    assert len(refused) * 60 <= MOST_REFUSED * len(CASES), refused
