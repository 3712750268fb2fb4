"""Compare what a pipeline left behind with the plain loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hocket.run.data.batch import split_batch
from hocket.run.data.loss import named_losses
from tests.run.support.exactness import NUM_EVALUATED, num_copies
from tests.run.support.forked import answers_of
from tests.run.support.plain_loop import call_model, num_parts_of, plain_loop
from tests.run.support.small_models import batches, make_model, specimen_of

TOLERANCE: Final = 1e-10
NUM_STEPS: Final = 20
FEW_STEPS: Final = 4  # for runs whose mechanism another run has for 20 steps


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


def of_four(model: str, schedule: str, num_microbatches: int, **more: Any) -> Any:
    """A run whose microbatches have 4 samples, and the last of them 3.

    For these, models are captured before workers begin (preloaded.py).
    """
    sizes = {"batch_size": 4 * num_microbatches - 1, "last": 2 * num_microbatches + 1}
    return case(model, schedule, num_microbatches, **{**sizes, **more})


def in_few_steps(*runs: dict[str, Any], num_steps: int = FEW_STEPS) -> list[Any]:
    """The same runs, of a few steps each."""
    return [{**run, "num_steps": num_steps} for run in runs]


Runs = Mapping[int, Sequence[dict[str, Any]]]


def quick_and_all(
    first: Runs, relatives: Runs, others: Runs, num_steps: int = FEW_STEPS
) -> tuple[dict[int, list[Any]], dict[int, list[Any]]]:
    """Return, by number of workers, what is always played, and all for 20 steps.

    Args:
        first: of each kind of order one, always for 20 steps.
        relatives: always played, for a few steps.
        others: never among the quick ones.
        num_steps: few.
    """
    quick = {
        n: [
            *first.get(n, ()),
            *in_few_steps(*relatives.get(n, ()), num_steps=num_steps),
        ]
        for n in sorted({*first, *relatives})
    }
    whole = {
        n: [*first.get(n, ()), *relatives.get(n, ()), *others.get(n, ())]
        for n in sorted({*first, *relatives, *others})
    }
    return quick, whole


_oracle = lru_cache(maxsize=2)(plain_loop)


def check_runs(
    cases: Sequence[dict[str, Any]],
    num_workers: int,
    folder: Path,
    *,
    whole_s: float = 200.0,
    entry: str = "exactness:train_all",
) -> None:
    """Train all of them in one job, and compare each with the plain loop.

    Args:
        cases: what to train, and how.
        num_workers: of the job.
        folder: of the test.
        whole_s: that the job may take.
        entry: of the workers.
    """
    answers = answers_of(
        entry,
        cases,
        str(folder),
        num_workers=num_workers,
        folder=folder,
        whole_s=whole_s,
    )
    for i, run in enumerate(cases):
        check_run(run, [worker[i] for worker in answers], folder / f"{i}.st")


def check_run(
    run: dict[str, Any], answers: Sequence[dict[str, Any]], state: Path
) -> float:
    """Weights, buffers, losses of each step, and the evaluation.

    Args:
        run: what was trained, and how.
        answers: of each worker.
        state: the file of the trained weights and buffers.

    Returns:
        The largest difference of a weight or buffer, relative to its largest entry.
    """
    expected, history = _oracle(
        run["model"],
        num_parts=num_parts_of(run),
        num_steps=run["num_steps"],
        batch_size=run["batch_size"],
        last=run["last"],
    )
    actual = load_file(state)
    assert sorted(actual) == sorted(expected), run
    far = {name: difference(actual[name], value) for name, value in expected.items()}
    worst = max(far, key=far.__getitem__)
    assert far[worst] <= TOLERANCE, f"{run}: {worst} is off by {far[worst]:.1e}"
    for worker in answers:
        assert len(worker["losses"]) == run["num_steps"], run
        assert worker["num_copies"] == num_copies(expected), run
        for step, losses in enumerate(history):
            for name, loss in losses.items():
                reported = worker["losses"][step][name]
                assert reported == pytest.approx(loss, rel=1e-9), f"{run}: {step}"
    check_alike(run, answers)
    check_evaluation(run, expected, answers)
    return far[worst]


def check_alike(run: dict[str, Any], answers: Sequence[dict[str, Any]]) -> None:
    """Replicas, and stages that share a weight, hold it bit for bit alike."""
    first: dict[str, int] = {}
    for worker in answers:
        for name, digest in worker["weights"].items():
            assert digest == first.setdefault(name, digest), f"{run}: {name}"


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    if a.numel() == 0 or not a.is_floating_point():
        return 0.0 if torch.equal(a, b) else float("inf")
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-12))


def check_evaluation(
    run: dict[str, Any], state: dict[str, Tensor], answers: Sequence[dict[str, Any]]
) -> None:
    """The pipeline's evaluation equals the trained model's own, by samples."""
    model = make_model(run["model"])
    model.load_state_dict(state)
    model.eval()
    specimen = specimen_of(run["model"])
    # In float32 the rounding of products depends on the number of rows.
    num_parts = num_parts_of(run)
    num_parts = 1 if specimen.is_double else num_parts
    data = batches(run["model"], run["num_steps"], run["batch_size"], run["last"])
    data = data[-NUM_EVALUATED:]
    sums: dict[str, float] = {}
    num_samples = 0
    with torch.no_grad():
        for batch, part in ((b, x) for b in data for x in split_batch(b, num_parts)):
            output = call_model(model, batch[0], part)
            named = named_losses(specimen.loss(output, part.targets))
            for name, value in named.items():
                sums[name] = sums.get(name, 0.0) + value.item() * part.num_samples
            num_samples += part.num_samples
    for answer in answers:
        assert answer["num_samples"] == num_samples
        for name, total in sums.items():
            mean = total / num_samples
            assert answer["evaluated"][name] == pytest.approx(mean, rel=1e-8)
