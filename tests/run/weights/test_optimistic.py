"""Updates that do not wait come to what the barrier comes to, bit for bit.

Whether steps clip always, never or now and then, whether they overflow, whatever is
looked at between two of them; with all kinds of optimizers, and averages, learning-rate
schedules, BatchNorm, dropout, tied weights, replicas.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file

from tests.run.engine.test_training import (
    check_answer,
    check_averages,
    check_state,
    trained,
)
from tests.run.support.comparison import NUM_STEPS, case
from tests.run.support.forked import answers_of
from tests.run.support.training_loop import plain_training

NEVER: Final = 1e6
ALWAYS: Final = 1e-3
OVERFLOWS: Final = {
    "precision": "float16",
    "factor": 1e2,
    "clip_norm": 80.0,
    "scheduler": True,
}

JOBS: Final = {
    "2 workers": [
        case("perceptron", "zb-h1", 4, optimizer="odd", clip_norm=1.2),
        case("resnet", "gpipe", 3, optimizer="nesterov", clip_norm=1.3, scheduler=True),
        case("perceptron", "1f1b", 4, ema_decay=0.9, accumulate=2) | OVERFLOWS,
    ],
    "2 workers more": [
        case("tied", "1f1b", 4, clip_norm=2.5, accumulate=2, ema_decay=0.9),
        case("perceptron", "1f1b", 4, clip_norm=ALWAYS),
        case(
            "perceptron", "zb-v", 4, optimizer="muon", scheduler=True, clip_norm=NEVER
        ),
        case("dropout", "interleaved-1f1b", 4, clip_norm=1.5, recompute="all"),
        case("perceptron", "zb-h2", 4, clip_norm=1.2, transport="torch"),
        case("perceptron", "gpipe", 2, num_replicas=2, clip_norm=1.2),
    ],
    "3 workers": [
        case("tied", "zb-h2", 4, clip_norm=2.5, ema_decay=0.9),
        case("resnet", "zb-h1", 4, optimizer="nesterov", clip_norm=1.3),
        case("tied-dropout", "interleaved-1f1b", 3, clip_norm=2.5, accumulate=2),
        case("perceptron", "1f1b", 4, optimizer="adafactor", clip_norm=1.2),
    ],
    "4 workers": [
        case("tied", "1f1b", 4, num_replicas=2, clip_norm=2.5, ema_decay=0.9),
        case("dropout", "zb-h1", 2, num_replicas=2, clip_norm=1.1, accumulate=2),
        case(
            "dropout", "gpipe", 2, num_replicas=2, optimizer="nesterov", clip_norm=1.1
        ),
        case("perceptron", "zb-h2", 6, clip_norm=1.2),
    ],
}
SOMETIMES: Final = {1.1, 1.2, 1.3, 1.5, 2.5, 80.0}  # as the norms of these models are


def both(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each with the barrier, and then without.

    Of the latter, every other one as if no worker knew the others' gradients when it
    updates, as it may be; it depends on who is faster.
    """
    optimistic = {"optimistic_updates": True}
    return [
        run | more
        for i, run in enumerate(runs)
        for more in ({}, optimistic | ({} if i % 2 else {"nobody_knows": True}))
    ]


@pytest.mark.parametrize(
    "job",
    [
        "2 workers",
        *(pytest.param(job, marks=pytest.mark.long) for job in list(JOBS)[1:]),
    ],
)
@pytest.mark.timeout(300)
def test_equals_the_barrier(job: str, tmp_path: Path) -> None:
    """Weights, averages, losses, norms and skipped steps: equal; and to the loop."""
    runs, num_workers = JOBS[job], int(job[0])
    answers = trained(both(runs), num_workers, tmp_path)
    for i, run in enumerate(runs):
        label = f"{job}: {run}"
        stems = tmp_path / f"{2 * i}", tmp_path / f"{2 * i + 1}"
        for what in ("state", "ema") if "ema_decay" in run else ("state",):
            barrier, optimistic = (load_file(x.with_suffix(f".{what}")) for x in stems)
            unlike = [n for n in barrier if not torch.equal(barrier[n], optimistic[n])]
            assert not unlike, f"{label}: {unlike}"
        for worker in answers:
            expected, told = worker[2 * i], worker[2 * i + 1]
            for name in ("losses", "norms", "skipped", "averaged"):
                assert told[name] == expected[name], f"{label}: {name}"
        if run.get("optimizer") != "odd" and "precision" not in run:
            check_loop(run, stems[1], [worker[2 * i + 1] for worker in answers], label)
        check_share(run, answers[0][2 * i])


def check_loop(
    run: dict[str, Any], stem: Path, answers: list[dict[str, Any]], label: str
) -> None:
    """As `test_training` does for all others."""
    expected = plain_training(run, tuple(answers[0]["boundaries"]))
    check_state(stem.with_suffix(".state"), expected.state, label)
    for answer in answers:
        check_answer(answer, expected, label)
    if expected.ema:
        check_averages(run, expected, stem, answers[0], label)


def check_share(run: dict[str, Any], answer: dict[str, Any]) -> None:
    """The cases are what they say: some steps are undone, and some are not."""
    wrong = [
        skipped or norm > run["clip_norm"]
        for norm, skipped in zip(answer["norms"], answer["skipped"], strict=True)
    ]
    if run["clip_norm"] in SOMETIMES:
        assert 0 < sum(wrong) < NUM_STEPS, (run, answer["norms"])
    if "precision" in run:
        assert 0 < sum(answer["skipped"]) < NUM_STEPS
    if run["clip_norm"] == ALWAYS:
        assert all(wrong)
    if run["clip_norm"] == NEVER:
        assert not any(wrong)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_frozen", [0, 1])
def test_whoever_looks_sees_weights_that_stand(num_frozen: int, tmp_path: Path) -> None:
    """Weights, averages, evaluations, checkpoints, norms, the end.

    Also where the first stage is frozen: its worker has no update, and plays ahead.
    """
    answers = answers_of(
        "tests.run.support.optimistic:looked_at",
        str(tmp_path),
        num_frozen,
        num_workers=2,
        folder=tmp_path,
    )
    for worker in answers:
        assert all(worker.values()), worker


@pytest.mark.timeout(120)
def test_nobody_waits_before_its_update(tmp_path: Path) -> None:
    """The last stage ends first, and updates while the first is still at work."""
    answers = answers_of(
        "tests.run.support.optimistic:slow_first",
        "gpipe",
        str(tmp_path),
        num_workers=2,
        folder=tmp_path,
    )
    barrier, optimistic = answers[1]
    assert barrier["updates_s"] >= barrier["complete_s"]
    assert optimistic["updates_s"] < optimistic["complete_s"]
    assert [told.index("waits") for told in barrier["events"].values()] == [1, 1, 1]
    for worker in answers:
        for told in worker[1]["events"].values():
            assert "waits" not in told[: told.index("updates")], told


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("num_workers", "cases"),
    [
        (
            2,
            [
                {"num_microbatches": 4, "num_batches": 6, "poisoned": 4},
                {"num_microbatches": 4, "num_batches": 5, "poisoned": 4},
                {
                    "num_microbatches": 2,
                    "num_batches": 6,
                    "poisoned": 4,
                    "transport": "torch",
                },
            ],
        ),
        pytest.param(
            4,
            [
                {
                    "num_microbatches": 2,
                    "num_replicas": 2,
                    "num_batches": 6,
                    "poisoned": 4,
                },
            ],
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_gradient_that_is_no_number_changes_no_weight(
    num_workers: int, cases: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The barrier's error, on every worker, and the weights that it leaves."""
    answers = answers_of(
        "tests.run.support.optimistic:fragile_twice",
        cases,
        str(tmp_path),
        num_workers=num_workers,
        folder=tmp_path,
    )
    for worker in answers:
        for answer in worker:
            barrier, optimistic = answer["told"]
            assert barrier[0] == "NonFiniteError"
            assert optimistic == barrier
            assert answer["same"]


@pytest.mark.timeout(120)
def test_a_forward_that_fails_in_doubt_says_so(tmp_path: Path) -> None:
    """The barrier would not have shown it these weights."""
    answers = answers_of(
        "tests.run.support.optimistic:wary",
        str(tmp_path),
        num_workers=2,
        folder=tmp_path,
    )
    kind, message, cause = answers[0]
    assert kind == "RunError"
    assert "a forward of step 1 failed, on weights whose update was in doubt" in message
    assert "these inputs are too large" in cause
    assert answers[1][0] == "WaitError"
