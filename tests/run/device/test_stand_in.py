"""Pipelines on a device whose tensors are not a CPU's (stand_in_device.py)."""

from __future__ import annotations

import math
import multiprocessing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.run.support.comparison import TOLERANCE, case, check_run
from tests.run.support.forked import answers_of
from tests.run.support.teacher_models import case_of

# A fork inherits autograd's threads, which know no device registered later.
SPAWN = multiprocessing.get_context("spawn")
WORKERS = "stand_in_workers"
# Ops of the device are Python's: a model with many of them trains for minutes.
FEW = [case("tied", "zb-h1", 4, num_steps=3)]
FEW_ON_TWO = [case("tied", "1f1b", 4, num_steps=3)]
MORE = {
    1: [case("resnet", "gpipe", 3), case("dropout", "interleaved-1f1b", 4)],
    2: [case("perceptron", "zb-v", 4), case("tied-dropout", "gpipe", 4)],
}
# Schedules that two workers play together, with what else they need.
SCHEDULES: list[tuple[list[str], dict[str, Any]]] = [
    (["1f1b", "gpipe", "zb-h1", "zb-h2", "zb-auto"], {"num_microbatches": 4}),
    (
        ["interleaved-1f1b", "interleaved-zb", "looped-bfs", "zb-v", "v-half"],
        {"num_microbatches": 4, "clip_norm": 0.5},
    ),
    (
        ["v-min", "dualpipe-v", "hanayo", "ooo-fast-forward", "ooo-modulo"],
        {"num_microbatches": 4},
    ),
    (
        ["pipedream-2bw", "wpipe", "wpipe-overlapped"],
        {"num_microbatches": 4, "clip_norm": 0.5},
    ),
    (["1f1b"], {"num_microbatches": 4, "num_replicas": 2, "clip_norm": 0.5}),
]


@dataclass(frozen=True, slots=True)
class Alone:
    """What one worker has found on the device.

    Args:
        answers: by question; see `stand_in_workers.on_one_worker`.
        folder: of the trained states.
    """

    answers: dict[str, Any]
    folder: Path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """One worker, a process that imports torch by itself."""
    folder = tmp_path_factory.mktemp("alone")
    [answers] = answers_of(
        f"{WORKERS}:on_one_worker",
        FEW,
        str(folder),
        num_workers=1,
        folder=folder,
        context=SPAWN,
        whole_s=240.0,
    )
    return Alone(answers, folder)


def check_runs(cases: list[dict[str, Any]], num_workers: int, folder: Path) -> None:
    """Train on the device, and compare with the plain loop on a CPU."""
    answers = answers_of(
        f"{WORKERS}:train_all",
        cases,
        str(folder),
        num_workers=num_workers,
        folder=folder,
        context=SPAWN,
        timeout_s=60.0,
        whole_s=280.0,
    )
    for i, run in enumerate(cases):
        check_run(run, [worker[i] for worker in answers], folder / f"{i}.st")


@pytest.mark.timeout(250)
def test_ops_and_copies_run_when_they_are_waited_for(alone: Alone) -> None:
    """Until then their memory holds what is no number."""
    queued, copied, value, arrived = alone.answers["memory"]

    assert all(map(math.isnan, [*queued, *copied]))
    assert value == arrived == [2.0] * 3


@pytest.mark.timeout(250)
def test_equals_the_plain_loop_on_a_cpu(alone: Alone) -> None:
    """No tensor is left behind on the host."""
    for i, run in enumerate(FEW):
        check_run(run, [alone.answers["trained"][i]], alone.folder / f"{i}.st")


@pytest.mark.long
@pytest.mark.timeout(150)
def test_two_workers_equal_the_plain_loop_on_a_cpu(tmp_path: Path) -> None:
    """They send staged messages."""
    check_runs(FEW_ON_TWO, 2, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_teachers_teach_there_as_on_a_cpu(tmp_path: Path) -> None:
    """A frozen one, one with a delay, and one whose whole batch is read."""
    cases = [
        case_of("frozen", "1f1b"),
        case_of("momentum", "zb-h1", delay=1),
        case_of("momentum", "1f1b", whole_batch=True, loss="contrast-with-all"),
    ]
    for found in answers_of(
        f"{WORKERS}:teachers_twice",
        cases,
        str(tmp_path),
        folder=tmp_path,
        context=SPAWN,
        whole_s=280.0,
    ):
        assert max(found) <= TOLERANCE


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_workers", MORE)
def test_other_models_equal_the_plain_loop(num_workers: int, tmp_path: Path) -> None:
    """Buffers of batch norm, dropout, stages in a V."""
    check_runs(MORE[num_workers], num_workers, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(len(SCHEDULES)))
def test_every_schedule_trains_as_on_a_cpu(seed: int, tmp_path: Path) -> None:
    """Which others compare with their oracles; ops run late, as a seed decides."""
    schedules, settings = SCHEDULES[seed]
    for found in answers_of(
        f"{WORKERS}:train_twice",
        "deep",
        schedules,
        seed,
        settings,
        folder=tmp_path,
        context=SPAWN,
        timeout_s=120.0,
        whole_s=850.0,
    ):
        assert found.keys() == {*schedules}
        assert max(found.values()) <= 1e-10, found


@pytest.mark.long
@pytest.mark.timeout(150)
def test_plans_from_steps_on_the_device(tmp_path: Path) -> None:
    """Trial runs with staged messages; both workers come to the same plan."""
    first, second = answers_of(
        f"{WORKERS}:plan_by_trials",
        "perceptron",
        folder=tmp_path,
        context=SPAWN,
        whole_s=140.0,
    )

    assert first == second
    assert any("num_devices=2" in candidate for candidate in first)


def check_waits(steps: list[list[int]]) -> None:
    """From the third step on, ops are queued behind each wait of the host."""
    assert len(steps) == 6
    for queued in steps[2:-1]:
        assert min(queued, default=10) >= 10


def check_broken(broken: list[str], found: dict[str, Any]) -> None:
    """Step 2 has changed nothing, and was named then or one step later."""
    assert 2 <= found["num_yielded"] <= 3
    assert found["changed"] == []
    assert found["off"] <= TOLERANCE
    words = {
        "gradient": "its gradients are not",
        "loss": "the loss is",
        "counts": "what it divides by, is 4, and in that of microbatch 1 3",
    }
    assert words[broken[0]] in found["error"]
    assert "step 2" in found["error"]


@pytest.mark.timeout(250)
def test_the_host_waits_for_no_step_that_it_plays(alone: Alone) -> None:
    """Only for the one before, with ops queued behind; it waited three times."""
    check_waits(alone.answers["waits"])


@pytest.mark.timeout(250)
def test_a_broken_step_changes_nothing(alone: Alone) -> None:
    """The device leaves its update out, and the host names it one step later."""
    check_broken(["gradient", "AdamW"], alone.answers["broken"])


@pytest.mark.timeout(250)
def test_a_step_that_divides_by_other_numbers_changes_nothing(alone: Alone) -> None:
    """Past bug: the host waited for these numbers in each step."""
    check_broken(["counts", "AdamW"], alone.answers["uneven"])


@pytest.mark.long
@pytest.mark.timeout(150)
def test_the_host_waits_for_no_step_of_other_orders(tmp_path: Path) -> None:
    """Weight gradients that wait, and steps that overlap."""
    [found] = answers_of(
        f"{WORKERS}:more_waits",
        ["zb-h1", "pipedream-2bw"],
        num_workers=1,
        folder=tmp_path,
        context=SPAWN,
        whole_s=140.0,
    )
    for steps in found:
        check_waits(steps)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_broken_steps_change_nothing(tmp_path: Path) -> None:
    """Whether the gradient or the loss is not finite, under each fused optimizer."""
    cases = [["loss", "AdamW"], ["gradient", "SGD"], ["loss", "SGD"]]
    cases += [["gradient", "Adagrad"], ["gradient", "AdamW by default"]]
    [found] = answers_of(
        f"{WORKERS}:more_broken_steps",
        cases,
        num_workers=1,
        folder=tmp_path,
        context=SPAWN,
        whole_s=280.0,
    )
    for broken, one in zip(cases, found, strict=True):
        check_broken(broken, one)


@pytest.mark.timeout(250)
def test_a_dry_run_ends_where_the_host_waits_long(alone: Alone) -> None:
    """On a GPU that ten programs shared it went on for over a minute.

    It summed the steps' own milliseconds, and not the waits around each of them.
    """
    assert alone.answers["dry_run_s"] < 5.0
