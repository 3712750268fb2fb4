"""Pipelines with teachers equal the plain loop: float64, some steps of AdamW, 1e-10."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hocket
from tests.run.support.forked import answers_of
from tests.run.support.plainly import SGD
from tests.run.support.started import started
from tests.run.support.teacher_models import (
    NUM_STEPS,
    case_of,
    largest_difference,
    plain_loop,
)

TOLERANCE: Final = 1e-10

ONE_WORKER: Final = [
    case_of("frozen", "1f1b"),
    case_of("momentum", "gpipe", delay=0),
    case_of("momentum", "gpipe", delay=1),
]
TWO_WORKERS: Final = [
    case_of("frozen", "1f1b"),
    case_of("frozen", "gpipe", mode="train"),
    case_of("frozen", "interleaved-1f1b", stages_per_device=2),
    case_of("frozen", "zb-h1", drain_every=2),
    case_of("frozen", "1f1b", num_parts=8, frozen_blocks=3),
    case_of("frozen", "1f1b", loss="masked", clip_norm=0.05),
    case_of("momentum", "zb-h1", delay=1, interrupts=True),
    case_of("momentum", "gpipe", delay=1, whole_batch=True, loss="contrast-with-all"),
    case_of("momentum", "zb-v", is_tied=True),
    case_of("copies", "1f1b", delay=1),
    case_of("frozen", "1f1b", look_ahead=2, interrupts=True),
    case_of("momentum", "auto", delay=1),
    {
        "schedule": "1f1b",
        "teachers": {
            "a": {"kind": "frozen"},
            "b": {"kind": "momentum", "delay": 1},
            "c": {"kind": "momentum"},
        },
    },
]
MORE_ON_TWO: Final = [
    case_of("momentum", "1f1b"),
    case_of("momentum", "1f1b", delay=1, look_ahead=0),
    case_of("frozen", "auto"),
    case_of("frozen", "zb-auto"),
    case_of("frozen", "1f1b", cut=["head"]),
    case_of("frozen", "zb-h1", look_ahead=0),
    case_of("momentum", "gpipe", delay=3, look_ahead=1),
    case_of("frozen", "gpipe", loss="contrast"),
    case_of("frozen", "1f1b", recompute="all"),
    case_of("frozen", "zb-h1", num_parts=2),
    case_of("frozen", "1f1b", whole_batch=True, loss="contrast-with-all"),
    case_of("frozen", "1f1b", is_tied=True),
    case_of("momentum", "zb-auto", delay=1),
    case_of("frozen", "ooo-modulo"),
    case_of("momentum", "auto", stages_per_device=2),
    case_of("frozen", "auto", recompute="all"),
    case_of("momentum", "1f1b", delay=1, frozen_blocks=3),
    case_of("momentum", "zb-h1", delay=1, drain_every=3),
    case_of("momentum", "gpipe", delay=0, interrupts=True),
    case_of("momentum", "1f1b", delay=2, mode="eval"),
    case_of("momentum", "interleaved-1f1b", delay=1, stages_per_device=2),
    case_of("momentum", "gpipe", delay=1, loss="contrast"),
    case_of("momentum", "zb-h1", delay=1, is_tied=True, clip_norm=0.05),
    case_of("frozen", "1f1b", teacher_lane=True, num_parts=8),
    case_of("momentum", "1f1b", teacher_lane=True, delay=1),
]
FOUR_WORKERS: Final = [
    case_of("frozen", "1f1b", num_replicas=2, num_microbatches=2),
    case_of("momentum", "1f1b", delay=1, num_replicas=2, num_microbatches=2),
    case_of("frozen", "zb-h1"),
    case_of("momentum", "1f1b", delay=1),
    case_of(
        "frozen",
        "1f1b",
        whole_batch=True,
        loss="contrast-with-all",
        num_replicas=2,
        num_microbatches=2,
    ),
]


ACCUMULATED: Final = [
    case_of("frozen", "1f1b", accumulate=3),
    case_of("frozen", "gpipe", accumulate=2, num_parts=8),
    case_of("frozen", "1f1b", accumulate=3, whole_batch=True, loss="contrast-with-all"),
    case_of("frozen", "zb-h1", accumulate=2, interrupts=True, clip_norm=0.05),
    case_of("momentum", "gpipe", accumulate=3),
    case_of("momentum", "1f1b", accumulate=2, delay=1, interrupts=True),
    case_of("momentum", "gpipe", accumulate=2, delay=3, look_ahead=2),
]
COMPILED: Final = [
    case_of("frozen", "1f1b", compile=True),
    case_of("momentum", "zb-h1", delay=1, compile=True),
]


# A job of each, for the weights of a model stay in shards behind a pipeline.
SHARDED: Final = [
    (2, case_of("frozen", "1f1b", num_shards=2, num_microbatches=2)),
    (2, case_of("momentum", "gpipe", delay=0, num_shards=2, num_microbatches=2)),
    (4, case_of("frozen", "1f1b", num_shards=2, num_microbatches=2)),
    (
        4,
        case_of(
            *("momentum", "zb-h1"),
            delay=0,
            num_shards=2,
            num_microbatches=2,
            interrupts=True,
        ),
    ),
    (
        2,
        case_of(
            *("frozen", "1f1b"),
            whole_batch=True,
            loss="contrast-with-all",
            num_shards=2,
            num_microbatches=2,
        ),
    ),
]


def check_runs(cases: list[dict[str, Any]], num_workers: int, folder: Path) -> None:
    """Train all cases in one job, and compare each with the plain loop."""
    answers = answers_of(
        "teacher_workers:train_all",
        cases,
        str(folder),
        num_workers=num_workers,
        folder=folder,
        whole_s=200.0,
    )
    for i, case in enumerate(cases):
        state, history, evaluated = plain_loop(case)
        is_alone = case.get("num_replicas", 1) * case.get("num_shards", 1) == 1
        if not is_alone:  # each replica has batch norms of its own
            state = {name: x for name, x in state.items() if ".1." not in name}
        found = load_file(folder / f"{i}.st")
        found = {name: found[name] for name in state}
        assert largest_difference(found, state) <= TOLERANCE, case
        for worker in answers:
            answer = worker[i]
            assert not is_alone or answer["names"] == [*state], case
            assert answer["flags_kept"], case
            assert answer["measured_ops"] > 0
            is_compiled = case.get("compile", False)
            assert set(answer["compiled"].values()) == {is_compiled}, case
            num_steps = -(-NUM_STEPS // case.get("accumulate", 1))
            assert len(answer["losses"]) == num_steps
            for own, named in zip(answer["losses"], history, strict=True):
                assert own == pytest.approx(named, rel=1e-9), case
            if is_alone:
                assert answer["evaluated"] == pytest.approx(evaluated, rel=1e-8), case


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("cases", "num_workers"),
    [
        pytest.param(ONE_WORKER, 1, id="1"),
        pytest.param(TWO_WORKERS, 2, id="2"),
        pytest.param(ACCUMULATED[::2], 1, id="1, accumulated", marks=pytest.mark.long),
        pytest.param(ACCUMULATED, 2, id="2, accumulated"),
        pytest.param(COMPILED, 2, id="2, compiled", marks=pytest.mark.long),
        pytest.param(MORE_ON_TWO, 2, id="2, more", marks=pytest.mark.long),
        pytest.param(FOUR_WORKERS, 4, id="4", marks=pytest.mark.long),
    ],
)
def test_training_with_teachers_equals_the_plain_loop(
    cases: list[dict[str, Any]], num_workers: int, tmp_path: Path
) -> None:
    """Batch k reads a teacher after max(0, k - delay) updates, whatever the order.

    Weights, buffers, the losses of each step, and an evaluation; with drains,
    evaluations and saves in the loop. Frozen teachers are not in the state.
    """
    check_runs(cases, num_workers, tmp_path)


LANES: Final = [
    case_of("frozen", "1f1b", num_parts=8),
    case_of("momentum", "gpipe", mode="train"),
    case_of("momentum", "1f1b", delay=2, look_ahead=1, interrupts=True),
    case_of("frozen", "gpipe", whole_batch=True, loss="contrast-with-all"),
    case_of("frozen", "gpipe", loss="contrast"),
    case_of("momentum", "zb-h1", delay=1, clip_norm=0.05),
]


@pytest.mark.timeout(240)
def test_a_lane_of_its_own_changes_no_bit(tmp_path: Path) -> None:
    """On one device: weights, buffers and losses are those of one lane.

    The lanes are threads, so that forwards of the teacher and ops of the student do
    overlap.
    """
    cases = [{**case, "teacher_lane": x} for case in LANES for x in (False, True)]
    (found,) = answers_of(
        "teacher_workers:train_all",
        cases,
        str(tmp_path),
        num_workers=1,
        folder=tmp_path,
        whole_s=200.0,
    )
    for i in range(0, len(cases), 2):
        alone, beside = (load_file(tmp_path / f"{j}.st") for j in (i, i + 1))
        assert largest_difference(beside, alone) == 0.0, cases[i]
        assert [*alone] == [*beside]
        for key in ("losses", "evaluated"):
            assert found[i][key] == found[i + 1][key], cases[i]
        lanes = [found[j]["order"].count("d0.1") for j in (i, i + 1)]
        assert lanes == [0, 1]


def test_a_delay_changes_the_numbers() -> None:
    """Delays of 0, 1 and 2 are three trainings, so that the comparison means a lot."""
    states = [plain_loop(case_of("momentum", "1f1b", delay=d))[0] for d in range(3)]
    for a, b in ((0, 1), (1, 2), (0, 2)):
        assert largest_difference(states[a], states[b]) > 1e-4


SAVED: Final = [
    case_of("momentum", "1f1b", delay=1),
    case_of("momentum", "zb-h1", delay=2),
]
MORE_SAVED: Final = [case_of("momentum", "1f1b"), case_of("frozen", "1f1b")]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SAVED, id="delayed"),
        pytest.param(MORE_SAVED, id="newest", marks=pytest.mark.long),
    ],
)
def test_a_save_holds_all_that_a_moving_teacher_needs(
    cases: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Resuming is bit-exact in the same layout, and nearly so in another one.

    A delayed teacher's next batch reads weights from before its last update: these are
    in the save, too.
    """
    answers = answers_of(
        "teacher_workers:resume_all",
        cases,
        str(tmp_path),
        [1, 2, 5],
        folder=tmp_path,
        whole_s=200.0,
    )
    assert answers == [[[0.0] * 3] * len(cases)] * 2
    (off,) = answers_of(
        "teacher_workers:resume_elsewhere",
        cases[0],
        str(tmp_path),
        5,
        num_workers=1,
        folder=tmp_path,
    )
    assert off <= TOLERANCE


@pytest.mark.timeout(120)
def test_each_sample_counts_once(tmp_path: Path) -> None:
    """Without a sample's weight, the gradient loses that sample's term, and no more."""
    for off in answers_of("teacher_workers:influences", str(tmp_path), folder=tmp_path):
        assert len(off) == 14
        assert max(off) <= TOLERANCE


@pytest.mark.timeout(120)
def test_the_fastest_filled_order_is_chosen(tmp_path: Path) -> None:
    """Of schedules by name, none has a shorter step by the costs of their plans.

    The plans rest on one profile, and on the same messages and updates.
    """
    named = ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b"]
    for found in answers_of(
        "teacher_workers:steps_of", ["auto", *named], str(tmp_path), folder=tmp_path
    ):
        assert found["auto"] <= min(found[name] for name in named)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mode", [None, "train"])
def test_children_of_a_sequential_teacher_have_its_mode(mode: Any) -> None:
    """They run as they are; a dry run had put back the mode they were given in.

    A frozen teacher that came in training mode so normalized by its batches.
    """
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)).double()
    student = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).double()
    x = torch.randn(8, 16, dtype=torch.float64)
    beside = copy.deepcopy(teacher).train(mode == "train")
    output = student(x).detach()
    parts = [beside(part).detach() for part in x.chunk(2)]
    expected = nn.functional.mse_loss(output, torch.cat(parts)).item()
    with started(
        student,
        (lambda output, _, teachers: nn.functional.mse_loss(output, teachers["t"].own)),
        SGD,
        (x, x),
        teachers={"t": hocket.Teacher(teacher, mode=mode)},
    ) as pipeline:
        assert pipeline.step((x, x)).loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("num_workers", "case"), SHARDED)
def test_sharded_training_with_teachers_equals_the_plain_loop(
    num_workers: int, case: dict[str, Any], tmp_path: Path
) -> None:
    """Frozen teachers are sharded, too; others follow shards of the student."""
    check_runs([case], num_workers, tmp_path)
