"""Training as people do it equals the plain loop: float64, some steps, 1e-10.

Clipping, accumulation, averaged weights, parameter groups, optimizers with all kinds of
state, learning-rate schedules: over any number of stages and replicas, with tied
weights, dropout, BatchNorm, parameters without gradient and a smaller last step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hocket.run.data.loss import TOTAL
from tests.run.support.comparison import (
    NUM_STEPS,
    case,
    difference,
    in_few_steps,
    of_four,
)
from tests.run.support.forked import answers_of
from tests.run.support.plain_loop import (
    Trained,
    data_of,
    loss_of,
    model_of,
    plain_training,
)

TOLERANCE = 1e-10
EARLY_UPDATE = """\
d0  0F0 2F0 2B0 0F1 2F1 2B1 2U 0B0 0B1 0U
d1  1F0 3F0 3B0 1F1 3F1 3B1 3U 1B0 1B1 1U
"""


JOBS = {
    1: [
        of_four("tied", "gpipe", 3, clip_norm=0.3, accumulate=2, ema_decay=0.9),
        case("dropout", "interleaved-1f1b", 4, stages_per_device=3, optimizer="muon"),
    ],
    2: [
        case("perceptron", "1f1b", 4, clip_norm=0.1),
        case("tied", "1f1b", 4, clip_norm=0.3, accumulate=3, ema_decay=0.9),
        case("resnet", "1f1b", 3, accumulate=2, optimizer="sgd", clip_norm=0.2),
        case("tied", "looped-bfs", 4, optimizer="sgd"),
        case("tied", "gpipe", 2, num_replicas=2, optimizer="sgd", accumulate=2),
        case("dropout", "interleaved-1f1b", 4, accumulate=2, optimizer="adafactor"),
        case("tied-dropout", "1f1b", 4, optimizer="groups", scheduler=True),
        case("perceptron", "gpipe", 4, optimizer="muon", clip_norm=0.1, scheduler=True),
        of_four("tied", "1f1b", 2, optimizer="lars", transport="torch", accumulate=2),
        case("perceptron", "1f1b", 4, optimizer="named", ema_decay=0.5),
    ],
    3: [
        case("tied", "1f1b", 4, clip_norm=0.3, accumulate=2, ema_decay=0.9),
        of_four("tied", "gpipe", 3, optimizer="muon", clip_norm=0.3),
        case("dropout", "interleaved-1f1b", 3, optimizer="groups", accumulate=2),
        case("perceptron", "1f1b", 4, optimizer="sgd", clip_norm=0.1, scheduler=True),
    ],
    4: [
        case("tied", "1f1b", 4, num_replicas=2, clip_norm=0.3, ema_decay=0.9),
        case("tied-dropout", "1f1b", 2, num_replicas=2, accumulate=2, clip_norm=0.3),
        case("dropout", "gpipe", 2, num_replicas=4, optimizer="adafactor"),
        case("perceptron", "1f1b", 4, optimizer="sgd", accumulate=2, num_replicas=2),
    ],
}
SHARDED = {
    2: in_few_steps(
        case("tied", "1f1b", 2, num_shards=2, clip_norm=0.3, ema_decay=0.9),
        case("perceptron", "gpipe", 2, num_shards=2, optimizer="muon", clip_norm=0.1),
        case("dropout", "1f1b", 2, num_shards=2, optimizer="lars", scheduler=True),
        case("tied-dropout", "zb-h1", 2, num_shards=2, optimizer="groups"),
    ),
    4: in_few_steps(
        case("tied", "zb-v", 4, num_shards=2, clip_norm=0.1, accumulate=2),
        case("dropout", "1f1b", 2, num_shards=2, num_replicas=2, clip_norm=0.1),
    ),
}


MORE_SHARDED = {
    2: in_few_steps(
        case("tied", "1f1b", 2, num_shards=2, accumulate=2, clip_norm=0.3),
        case("perceptron", "1f1b", 2, num_shards=2, optimizer="named", ema_decay=0.5),
    ),
    4: in_few_steps(
        case("tied", "1f1b", 2, num_shards=2, clip_norm=0.3, ema_decay=0.9)
    ),
}


def trained(cases: list[dict[str, Any]], num_workers: int, folder: Path) -> list[Any]:
    """Every worker's answers, by rank and case."""
    return answers_of(
        "exactness:train_all",
        cases,
        str(folder),
        num_workers=num_workers,
        folder=folder,
        whole_s=200.0,
    )


@pytest.mark.parametrize(
    ("num_workers", "cases"),
    [
        pytest.param(1, in_few_steps(*JOBS[1]), id="1, few steps"),
        # The first with all of clipping, accumulation and averages has 20 steps.
        pytest.param(2, [JOBS[2][1], *in_few_steps(*JOBS[2][2:])], id="2, few steps"),
        *(pytest.param(n, SHARDED[n], id=f"{n}, sharded") for n in SHARDED),
        *(pytest.param(n, JOBS[n], id=f"{n}", marks=pytest.mark.long) for n in JOBS),
        *(
            pytest.param(n, cases, id=f"{n}, more shards", marks=pytest.mark.long)
            for n, cases in MORE_SHARDED.items()
        ),
    ],
)
@pytest.mark.timeout(300)
def test_equals_the_plain_loop(
    num_workers: int, cases: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Weights, averages, raw gradients, and each step's losses and gradient norm."""
    answers = trained(cases, num_workers, tmp_path)
    for i, run in enumerate(cases):
        expected = plain_training(run)
        label = f"{num_workers} workers: {run}"
        check_state(tmp_path / f"{i}.st", expected.state, label)
        for worker in answers:
            check_answer(worker[i], expected, label)
        if expected.ema:
            check_averages(run, expected, tmp_path / f"{i}", answers[0][i], label)
        if run.get("optimizer") == "sgd":
            files = [tmp_path / f"{i}.gradients-{rank}" for rank in range(num_workers)]
            check_gradients(files, expected, label)


def check_state(path: Path, expected: dict[str, torch.Tensor], label: str) -> None:
    """Every tensor is there, and alike."""
    actual = load_file(path)
    assert actual.keys() <= expected.keys(), label
    for name in actual:
        assert difference(actual[name], expected[name]) <= TOLERANCE, f"{label}: {name}"


def check_answer(answer: dict[str, Any], expected: Trained, label: str) -> None:
    """What was returned to the workers of each step."""
    assert len(answer["losses"]) == len(expected.losses), label
    assert answer["norms"] == pytest.approx(expected.norms, rel=1e-9), label
    assert answer["skipped"] == expected.skipped, label
    for step, losses in enumerate(expected.losses):
        reported = answer["losses"][step]
        assert reported == pytest.approx(losses, rel=1e-9), f"{label}: {step}"


def check_averages(
    run: dict[str, Any], expected: Trained, stem: Path, answer: Any, label: str
) -> None:
    """They are right, are evaluated with, and leave the weights as they were."""
    check_state(stem.with_suffix(".ema"), expected.ema, label)
    before, after = (load_file(stem.with_suffix(f".{x}")) for x in ("st", "after"))
    assert all(torch.equal(before[name], after[name]) for name in before), label
    model = model_of(run)
    model.load_state_dict(expected.ema)
    model.eval()
    total, num_samples = 0.0, 0
    with torch.no_grad():
        for inputs, targets in data_of(run):
            output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
            loss = loss_of(run)(output, targets)
            value = sum(loss.values()) if isinstance(loss, dict) else loss
            total += float(value) * len(targets)
            num_samples += len(targets)
    assert answer["averaged"] == pytest.approx(total / num_samples, rel=1e-8), label


def check_gradients(files: list[Path], expected: Trained, label: str) -> None:
    """What each optimizer was given, whole and once, on every worker."""
    seen = set()
    for path in files:
        for key, gradient in load_file(path).items():
            step, name = key.split("/")
            wanted = expected.gradients[int(step)][name]
            assert difference(gradient, wanted) <= TOLERANCE, f"{label}: {key}"
            seen.add(key)
    due = {f"{i}/{n}" for i, named in enumerate(expected.gradients) for n in named}
    assert seen == due, label


@pytest.mark.timeout(120)
def test_an_early_update_waits_for_all_gradients(tmp_path: Path) -> None:
    """An order may update a stage before another one's backwards; clipping is whole."""
    run = case("perceptron", EARLY_UPDATE, 2, clip_norm=0.1)
    answers = trained([run], 2, tmp_path)
    expected = plain_training(run)
    check_state(tmp_path / "0.st", expected.state, str(run))
    check_answer(answers[1][0], expected, str(run))


SKIPS = {"precision": "float16", "factor": 1e2, "clip_norm": 20.0}
AVERAGED = case("perceptron", "1f1b", 4, ema_decay=0.9, accumulate=2, scheduler=True)

HALVES = [
    *in_few_steps(
        case("perceptron", "1f1b", 4, precision="bfloat16", clip_norm=0.1),
        case("resnet", "1f1b", 3, precision="bfloat16"),
        case("dropout", "1f1b", 4, precision="bfloat16", accumulate=2),
    ),
    AVERAGED | SKIPS,
]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("num_workers", [2, pytest.param(3, marks=pytest.mark.long)])
def test_autocast_is_bit_equal(num_workers: int, tmp_path: Path) -> None:
    """Cut or not, the kernels and the order of additions are the same.

    With float16 the scale is too large for the first steps: all workers skip the same,
    and learning rates and averages stand still.
    """
    answers = trained(HALVES, num_workers, tmp_path)
    for i, run in enumerate(HALVES):
        expected = plain_training(run)
        actual = load_file(tmp_path / f"{i}.st")
        for name, value in expected.state.items():
            assert torch.equal(actual[name], value), f"{run}: {name}"
        for worker in answers:
            assert worker[i]["skipped"] == expected.skipped, run
            finite = [not skipped for skipped in expected.skipped]
            reported = [
                n for n, good in zip(worker[i]["norms"], finite, strict=True) if good
            ]
            due = [n for n, good in zip(expected.norms, finite, strict=True) if good]
            assert reported == due, run
            for reported_of, losses in zip(
                worker[i]["losses"], expected.losses, strict=True
            ):
                assert reported_of == pytest.approx(losses, rel=1e-12), run
        if expected.ema:
            check_state(tmp_path / f"{i}.ema", expected.ema, str(run))
        if run["precision"] == "float16":
            assert 0 < sum(expected.skipped) < NUM_STEPS // 2


@pytest.mark.timeout(120)
def test_shards_under_autocast_skip_what_the_loop_skips(tmp_path: Path) -> None:
    """Scaled, clipped, averaged; sums over shards are rounded otherwise."""
    run = AVERAGED | SKIPS | {"num_microbatches": 2, "num_shards": 2}
    answers = trained([run], 2, tmp_path)
    expected = plain_training(run)
    assert sum(expected.skipped) > 0
    for worker in answers:
        assert worker[0]["skipped"] == expected.skipped
    for kind, state in (("st", expected.state), ("ema", expected.ema)):
        actual = load_file(tmp_path / f"0.{kind}")
        for name, value in state.items():
            assert difference(actual[name], value) < 1e-3, f"{kind} {name}"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_workers", [2, pytest.param(4, marks=pytest.mark.long)])
def test_tied_weights_and_replicas_under_autocast(
    num_workers: int, tmp_path: Path
) -> None:
    """Not bit for bit: uncut, both uses of a tied weight share one rounded gradient."""
    run = case("tied", "1f1b", 4, precision="bfloat16", num_replicas=num_workers // 2)
    run |= {"num_steps": 5}
    answers = trained([run], num_workers, tmp_path)
    expected = plain_training(run)
    reported = [losses[TOTAL] for losses in answers[0][0]["losses"]]
    assert reported == pytest.approx([x[TOTAL] for x in expected.losses], rel=2e-2)
    assert all(answer[0]["losses"] == answers[0][0]["losses"] for answer in answers)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("num_workers", "cases"),
    [
        (1, [{"num_microbatches": 2}]),
        (2, [{"num_microbatches": 4}, {"num_microbatches": 2, "num_replicas": 2}]),
        (2, [{"num_microbatches": 2, "num_shards": 2}]),
        (4, [{"num_microbatches": 2, "num_replicas": 2, "accumulate": 2}]),
    ],
)
def test_a_gradient_that_is_no_number_changes_no_weight(
    num_workers: int, cases: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Behind a finite loss; every worker stops, and names the same parameter."""
    answers = answers_of(
        "fragile_workers:fragile_all",
        cases,
        str(tmp_path),
        num_workers=num_workers,
        folder=tmp_path,
    )
    for worker in answers:
        for run, answer in zip(cases, worker, strict=True):
            step = 4 // run.get("accumulate", 1)
            assert answer["raised"] == [
                "NonFiniteError",
                f"the losses of step {step} are finite, its gradients are not: the "
                "first at fault is that of 0.weight, stage 0; no weights were updated "
                "from it",
            ]
            assert answer["num_done"] == step
            assert answer["same"]
