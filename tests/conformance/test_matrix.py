"""What the plain loop would do, each way to run it does, or refuses by name.

A cell is a case and a way to run it. All weights, buffers and losses, the loss in
evaluation mode, and what the script's own functions see are those of the plain loop to
1e-10; or an error of hocket's names what it refuses. A cell that is still open must be
as its case says, so that whoever mends one changes the case.
"""

from __future__ import annotations

from typing import Final

import pytest
import torch

from tests.conformance.cases import CASES
from tests.conformance.script import WAYS, Verdict
from tests.conformance.ways import TOLERANCE, Outcome, run
from tests.conformance.workers import run_on_two
from tests.run.support.worker_pool import WorkerPool

MOST_REFUSED: Final = 12  # of 60 cases
MAIN: Final = ("own-1", "own-2", "seq-1", "seq-2")
CELLS: Final = [
    (name, way)
    for name, found in CASES.items()
    for way in WAYS
    if found.verdict(way).kind != "none"
]
ALONE: Final = [cell for cell in CELLS if not cell[1].endswith("2")]
ON_TWO: Final = [cell for cell in CELLS if cell[1].endswith("2")]


def check(verdict: Verdict, outcome: Outcome) -> None:
    """Compare what came with what must come."""
    is_equal = not outcome.error and outcome.worst <= TOLERANCE
    if verdict.kind == "equal":
        assert is_equal, str(outcome)
    elif verdict.kind == "refused":
        assert outcome.is_ours, str(outcome) or "it is not refused"
        assert verdict.text in outcome.error
    elif verdict.error:
        assert verdict.error in outcome.error, f"no longer so: {outcome}"
    else:
        assert not outcome.error, f"no longer so: {outcome}"
        assert not is_equal, "the numbers are the plain loop's: no longer open"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("name", "way"), ALONE)
def test_on_one_worker(name: str, way: str) -> None:
    """As the plain loop, or refused by name."""
    torch.set_num_threads(1)
    check(CASES[name].verdict(way), run(CASES[name], way))


@pytest.mark.timeout(60)
@pytest.mark.xdist_group("conformance on two workers")
@pytest.mark.parametrize(("name", "way"), ON_TWO)
def test_on_two_workers(two_workers: WorkerPool, name: str, way: str) -> None:
    """As the plain loop, or refused by name."""
    check(CASES[name].verdict(way), run_on_two(two_workers, name, way))


def test_few_cases_are_refused() -> None:
    """A refusal is the second choice."""
    kinds = {name: {x.verdict(way).kind for way in MAIN} for name, x in CASES.items()}
    refused = [name for name, found in kinds.items() if "refused" in found]
    assert len(refused) * 60 <= MOST_REFUSED * len(CASES), refused
