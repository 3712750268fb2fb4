"""Every architecture, in 2, 3 and 4 stages, equals the plain loop after 20 steps.

Design, section 4. `make test` has those of `FEW`, in 4 stages, which cut at the most
places, for a few steps; `make test-long` has all, in 2, 3 and 4, for 20. All stages lie
on two workers, so that every value that skips stages travels to the next one, and on
from there:

    2 stages   0 │ 1         3 stages   0 2 │ 1         4 stages   0 2 │ 1 3
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from bench.zoo.architecture import NAMES
from tests.run.support.comparison import FEW_STEPS, NUM_STEPS, check_run
from tests.run.support.fork_server import fork_server
from tests.run.support.small_models import specimen_of
from tests.zoo.specimens import HAS_TORCHVISION, NEED_TORCHVISION, SPECIMENS
from tests.zoo.training import ANSWERS, OUTPUT, capture_and_train

THERE_AND_BACK: Final = """
    d0  0F0 0F1 0F2 0F3 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 0B0 0B1 0B2 0B3 0U 2U
    d1  1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3 1U
"""
ORDERS: Final[dict[int, dict[str, Any]]] = {
    2: {"schedule": "1f1b"},
    3: {"schedule": THERE_AND_BACK},
    4: {"schedule": "interleaved-1f1b", "stages_per_device": 2},
}
ALL: Final = (
    "densenet",
    "mobilenetv3",
    "resnet",
    "resnext",
    "retinanet",
    "unet",
    "vit",
    "frozen",
    "perceptron",
    "bert",
    "distilbert",
    "gpt2",
    "lstm",
    "t5",
    "tied",
    "transformer",
    "branching",
    "mixed-types",
    "nested",
)
HERE: Final = tuple(x for x in ALL if HAS_TORCHVISION or x not in NEED_TORCHVISION)
# One of each kind: skips across cuts, frozen and tied weights, passed state, several
# inputs, branches, types and structures of values. retinanet, with a loss of its own,
# takes as long as all others: it is among the long tests.
_KINDS: Final = (
    *("unet", "vit", "frozen", "bert", "lstm", "tied"),
    *("branching", "mixed-types", "nested"),
)
FEW: Final = tuple(x for x in _KINDS if x in HERE)


def case(
    num_stages: int, names: Sequence[str], num_steps: int = NUM_STEPS
) -> dict[str, Any]:
    """A training run of each, with uneven microbatches and an uneven last batch."""
    return {
        "num_microbatches": 4,
        "num_replicas": 1,
        "num_steps": num_steps,
        "batch_size": 10,
        "last": 9,
        "cuts": {name: specimen_of(name).cuts.get(num_stages) for name in names},
        **ORDERS[num_stages],
    }


@dataclass(frozen=True, slots=True)
class Job:
    """What is left of training all architectures.

    Args:
        names: the architectures.
        cases: how each was trained, by number of stages.
        answers: of each worker, for each architecture and case.
        folder: of the trained states.
    """

    names: Sequence[str]
    cases: Sequence[dict[str, Any]]
    answers: Sequence[list[list[dict[str, Any]]]]
    folder: Path


def trained(
    names: Sequence[str], numbers: Sequence[int], folder: Path, num_steps: int
) -> Job:
    """Train in one process for all: it loads torch, transformers and torchvision."""
    cases = [case(num_stages, names, num_steps) for num_stages in numbers]
    process = fork_server().Process(
        target=capture_and_train, args=(list(names), cases, folder)
    )
    process.start()
    try:
        process.join(900.0)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == 0, (folder / OUTPUT).read_text()
    answers = json.loads((folder / ANSWERS).read_text())
    return Job(names, cases, answers, folder)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Some architectures, in as many stages as there are."""
    return trained(FEW, [max(ORDERS)], tmp_path_factory.mktemp("zoo"), FEW_STEPS)


@pytest.fixture(scope="module")
def long_job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """All architectures."""
    return trained(HERE, sorted(ORDERS), tmp_path_factory.mktemp("zoo"), NUM_STEPS)


def check(name: str, job: Job) -> None:
    """Weights, buffers, losses of each step, and the evaluation, in each cut."""
    for i, run in enumerate(job.cases):
        both = [worker[job.names.index(name)][i] for worker in job.answers]
        num_cuts = len(both[0]["boundaries"])
        assert ORDERS[num_cuts + 1].items() <= run.items()
        check_run({**run, "model": name}, both, job.folder / f"{name}-{i}.st")
        is_trained = both[0]["trained"]
        assert is_trained.count(False) == num_cuts * (name == "frozen")


def test_has_enough() -> None:
    """At least fifteen architectures, none of them forgotten here or in bench."""
    assert len(ALL) >= 15
    assert set(SPECIMENS) <= set(ALL)
    assert sorted(NAMES) == sorted(ALL)


@pytest.mark.xdist_group("zoo")
@pytest.mark.parametrize("name", FEW)
@pytest.mark.timeout(1000)
def test_equals_the_plain_loop(name: str, job: Job) -> None:
    """In four stages, two on each worker."""
    check(name, job)


@pytest.mark.long
@pytest.mark.xdist_group("zoo")
@pytest.mark.parametrize("name", HERE)
@pytest.mark.timeout(1000)
def test_equals_the_plain_loop_in_any_number_of_stages(
    name: str, long_job: Job
) -> None:
    """In two, three and four stages."""
    check(name, long_job)


@pytest.mark.parametrize("name", NEED_TORCHVISION)
def test_has_torchvision(name: str) -> None:
    """Says which architectures were left out above, and why."""
    if not HAS_TORCHVISION:
        pytest.skip(f"{name} needs torchvision: pip install hocket[vision]")

    assert name in SPECIMENS
