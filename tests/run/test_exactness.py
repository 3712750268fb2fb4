"""Every synchronous pipeline equals the plain loop, after 20 AdamW steps in float64.

Design, section 4: whatever the order, the cut, the number of workers and of replicas;
with BatchNorm, dropout, tied weights, a skip across cuts, several inputs, arguments
that are no tensors, parameters without gradient, and a smaller last batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hocket
from hocket.run.loss import named_losses
from tests.run.plain_loop import plain_loop
from tests.run.zoo import ZOO, batches, make_model

NUM_STEPS = 20
TOLERANCE = 1e-10


def case(
    model: str, schedule: str, num_microbatches: int, **more: Any
) -> dict[str, Any]:
    """One training run, with an uneven last batch."""
    return {
        "model": model,
        "schedule": schedule,
        "num_microbatches": num_microbatches,
        "num_replicas": 1,
        "num_steps": NUM_STEPS,
        "batch_size": 14,
        "last": 9,
        **more,
    }


JOBS = {
    1: [
        case("resnet", "gpipe", 3),
        case("tied", "1f1b", 4),
        case("dropout", "interleaved-1f1b", 4, stages_per_device=3),
    ],
    2: [
        case("perceptron", "gpipe", 4),
        case("perceptron", "1f1b", 4),
        case("perceptron", "interleaved-1f1b", 4),
        case("perceptron", "looped-bfs", 4),
        case("resnet", "1f1b", 3),
        case("tied", "1f1b", 4),
        case("tied", "looped-bfs", 4),
        case("tied", "gpipe", 2, num_replicas=2),
        case("dropout", "1f1b", 4),
        case("tied-dropout", "interleaved-1f1b", 4),
        case("resnet", "1f1b", 4, transport="torch"),
        case("tied", "interleaved-1f1b", 4, transport="torch"),
    ],
    3: [
        case("tied", "1f1b", 4),
        case("resnet", "gpipe", 2),
        case("dropout", "interleaved-1f1b", 3),
    ],
    4: [
        case("perceptron", "1f1b", 6),
        case("tied", "1f1b", 4, num_replicas=2),
        case("dropout", "interleaved-1f1b", 4, num_replicas=2),
        case("perceptron", "gpipe", 2, num_replicas=4),
        case("tied-dropout", "1f1b", 4),
    ],
}


@pytest.mark.parametrize("num_workers", sorted(JOBS))
@pytest.mark.timeout(240)
def test_equals_the_plain_loop(num_workers: int, tmp_path: Path) -> None:
    """Weights, buffers, losses of each step, and the evaluation."""
    cases = JOBS[num_workers]
    answers = hocket.launch(
        "tests.run.exactness:train_all",
        [cases, str(tmp_path)],
        num_workers=num_workers,
        run_dir=tmp_path,
    )

    for i, run in enumerate(cases):
        expected, history = plain_loop(
            run["model"],
            tuple(answers[0][i]["boundaries"]),
            num_parts=run["num_microbatches"] * run["num_replicas"],
            num_steps=NUM_STEPS,
            batch_size=run["batch_size"],
            last=run["last"],
        )
        if run["num_replicas"] > 1 and run["model"] == "resnet":
            pytest.fail(
                "replicas keep their own BatchNorm statistics; not in this test"
            )
        actual = load_file(tmp_path / f"{i}.st")
        label = f"{num_workers} workers: {run}"
        assert sorted(actual) == sorted(expected), label
        for name, value in expected.items():
            assert difference(actual[name], value) <= TOLERANCE, f"{label}: {name}"
        for worker in answers:
            assert len(worker[i]["history"]) == NUM_STEPS, label
            for step, losses in enumerate(history):
                for name, loss in losses.items():
                    told = worker[i]["history"][step][name]
                    assert told == pytest.approx(loss, rel=1e-9), f"{label}: {step}"
        check_evaluation(run, expected, [worker[i] for worker in answers])


def check_evaluation(
    run: dict[str, Any], state: dict[str, torch.Tensor], answers: list[dict[str, Any]]
) -> None:
    """The pipeline's evaluation equals the trained model's own, by samples."""
    model = make_model(run["model"])
    model.load_state_dict(state)
    model.eval()
    data = batches(run["model"], NUM_STEPS, run["batch_size"], run["last"])
    sums: dict[str, float] = {}
    num_samples = 0
    with torch.no_grad():
        for inputs, targets in data:
            output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
            for name, value in named_losses(
                ZOO[run["model"]].loss(output, targets)
            ).items():
                sums[name] = sums.get(name, 0.0) + value.item() * len(targets)
            num_samples += len(targets)
    for answer in answers:
        assert answer["num_samples"] == num_samples
        for name, total in sums.items():
            assert answer["evaluated"][name] == pytest.approx(
                total / num_samples, rel=1e-8
            )


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    if a.numel() == 0 or not a.is_floating_point():
        return 0.0 if torch.equal(a, b) else float("inf")
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-12))
