"""Pipelines on a device whose tensors are not a CPU's (stand_in_device.py)."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from tests.run.support.comparison import case, check_run
from tests.run.support.forked import answers_of

# A fork inherits autograd's threads, which know no device registered later.
SPAWN = multiprocessing.get_context("spawn")
WORKERS = "tests.run.support.stand_in_workers"
JOBS = {
    1: [
        case("perceptron", "1f1b", 4),
        case("resnet", "gpipe", 3),
        case("tied", "zb-h1", 4),
    ],
    2: [
        case("tied", "1f1b", 4),
        case("perceptron", "zb-v", 4),
    ],
}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("num_workers", JOBS)
def test_equals_the_plain_loop_on_a_cpu(num_workers: int, tmp_path: Path) -> None:
    """No tensor is left behind on the host; two workers send staged messages."""
    answers = answers_of(
        f"{WORKERS}:train_all",
        JOBS[num_workers],
        str(tmp_path),
        num_workers=num_workers,
        folder=tmp_path,
        context=SPAWN,
        whole_s=120.0,
    )

    for i, run in enumerate(JOBS[num_workers]):
        check_run(run, [worker[i] for worker in answers], tmp_path / f"{i}.st")


@pytest.mark.timeout(100)
def test_the_host_waits_twice_in_a_lane(tmp_path: Path) -> None:
    """Once for the losses after the last forward, once for the norms, per step."""
    [steps] = answers_of(
        f"{WORKERS}:waits_by_step",
        "perceptron",
        "1f1b",
        num_workers=1,
        folder=tmp_path,
        context=SPAWN,
        whole_s=90.0,
    )

    assert len(steps) == 4
    for waits in steps[1:]:
        assert waits["in_lanes"] == ["tolist", "copy to the host"]
