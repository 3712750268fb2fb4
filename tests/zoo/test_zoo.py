"""Every architecture, in 2, 3 and 4 stages, equals the plain loop after 20 steps.

Design, section 4. All stages lie on two workers, so that every value that skips stages
travels to the next one, and on from there:

    2 stages   0 │ 1         3 stages   0 2 │ 1         4 stages   0 2 │ 1 3
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from bench.zoo.architecture import NAMES
from tests.run.comparison import check_run
from tests.run.forked import answers_of
from tests.run.zoo import specimen_of
from tests.zoo.specimens import HAS_TORCHVISION, NEED_TORCHVISION, SPECIMENS

THERE_AND_BACK: Final = """
    d0  0F0 0F1 0F2 0F3 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 0B0 0B1 0B2 0B3 0U 2U
    d1  1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3 1U
"""
ORDERS: Final[dict[int, dict[str, Any]]] = {
    2: {"schedule": "1f1b"},
    3: {"schedule": THERE_AND_BACK},
    4: {"schedule": "interleaved-1f1b", "stages_per_device": 2},
}
# Few jobs, for each has three processes that load torch, transformers and torchvision.
JOBS: Final = {
    "vision": (
        "densenet",
        "mobilenetv3",
        "resnet",
        "resnext",
        "retinanet",
        "unet",
        "vit",
        "frozen",
        "perceptron",
    ),
    "text": (
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
    ),
}
ALL: Final = tuple(name for names in JOBS.values() for name in names)


def case(num_stages: int, names: Sequence[str]) -> dict[str, Any]:
    """A training run of each, with uneven microbatches and an uneven last batch."""
    return {
        "num_microbatches": 4,
        "num_replicas": 1,
        "num_steps": 20,
        "batch_size": 10,
        "last": 9,
        "cuts": {name: specimen_of(name).cuts.get(num_stages) for name in names},
        **ORDERS[num_stages],
    }


def train(names: Sequence[str], folder: Path) -> dict[tuple[str, int], float]:
    """Train the architectures in all numbers of stages, and compare.

    Returns:
        Of each architecture and number of stages, how far it is off.
    """
    cases = [case(num_stages, names) for num_stages in ORDERS]
    answers = answers_of(
        "tests.zoo.training:train_all",
        names,
        cases,
        str(folder),
        num_workers=2,
        folder=folder,
        timeout_s=60.0,  # one may still import what the other has
        whole_s=500.0,
    )
    found = {}
    for k, name in enumerate(names):
        for i, num_stages in enumerate(ORDERS):
            both = [worker[k][i] for worker in answers]
            assert len(both[0]["boundaries"]) == num_stages - 1
            run = {**cases[i], "model": name}
            state = folder / f"{name}-{i}.st"
            found[name, num_stages] = check_run(run, both, state)
            trained = both[0]["trained"]
            assert trained.count(False) == (num_stages - 1) * (name == "frozen")
    return found


def test_has_enough() -> None:
    """At least fifteen architectures, none of them forgotten here or in bench."""
    assert len(ALL) >= 15
    assert set(SPECIMENS) <= set(ALL)
    assert sorted(NAMES) == sorted(ALL)


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.timeout(600)
def test_equals_the_plain_loop(job: str, tmp_path: Path) -> None:
    """Weights, buffers, losses of each step, and the evaluation."""
    names = [x for x in JOBS[job] if HAS_TORCHVISION or x not in NEED_TORCHVISION]

    assert len(train(names, tmp_path)) == len(names) * len(ORDERS)


@pytest.mark.parametrize("name", NEED_TORCHVISION)
def test_has_torchvision(name: str) -> None:
    """Says which architectures were left out above, and why."""
    if not HAS_TORCHVISION:
        pytest.skip(f"{name} needs torchvision: pip install hocket[vision]")

    assert name in SPECIMENS
