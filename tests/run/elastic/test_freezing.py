"""Freezing layers while training runs equals one process that does the same."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket.freeze.policy import Decider
from tests.run.support.forked_launch import launch_forked
from tests.run.support.freezing_workers import (
    ADAMW,
    NUM_PARTS,
    NUM_STEPS,
    PARTS,
    POLICIES,
    emulated,
    make_batches,
    make_model,
)
from tests.run.support.started import started

ENTRY = "freezing_workers:train_freezing"
NUM_FROZEN = {
    "fixed": [0, 0, 4, 4, 6, 6, 7, 7, 7],  # two stages keep a block and the head
    "recut": [0, 0, 4, 4, 6, 6, 7, 7, 8],
    "six": [0, 0, 4, 4, 6, 6, 7, 7, 8],
    "there and back": [0, 0, 4, 4, 6, 6, 2, 2, 7],
    "stays": [0, 0, 4, 4, 6, 6, 2, 2, 7],
    "greedy": [0, 0, 4, 4, 6, 6, 2, 2, 7],
}
LAYOUTS = {
    "fixed": ["2x1"] * NUM_STEPS,
    "stays": ["2x1"] * NUM_STEPS,
    "greedy": ["2x1"] * 2 + ["1x2"] * 4 + ["2x1"] * 2 + ["1x2"],
    "six": ["6x1"] * 2 + ["3x2"] * 2 + ["1x6"] * 5,
    "recut": ["4x1"] * 2 + ["2x2"] * 2 + ["1x4"] * 5,
    "there and back": ["4x1"] * 2 + ["2x2"] * 2 + ["1x4"] * 2 + ["4x1"] * 2 + ["1x4"],
}


@pytest.mark.parametrize(
    ("num_workers", "shapes", "options", "norm", "schedule", "policy"),
    [
        (2, "fixed", "plain", "BatchNorm1d", "1f1b", "alpha"),
        (6, "six", "all", "LayerNorm", "1f1b", "alpha"),
        (4, "recut", "tensor rate", "LayerNorm", "gpipe", "there and back"),
        (2, "chosen", "plain", "LayerNorm", "1f1b", "gradients"),
        # Past bug: a pipeline that was halved never became longer again.
        (2, "greedy", "plain", "LayerNorm", "1f1b", "there and back"),
        # The first device freezes as a whole, the other in part; both train again.
        (2, "stays", "tensor rate", "BatchNorm1d", "1f1b", "there and back"),
    ],
)
def test_equals_one_process(
    tmp_path: Path,
    num_workers: int,
    shapes: str,
    options: str,
    norm: str,
    schedule: str,
    policy: str,
) -> None:
    """Losses and weights after 9 steps, with four decisions in between."""
    found = launch_forked(
        ENTRY,
        [shapes, options, norm, schedule, policy],
        num_workers=num_workers,
        run_dir=tmp_path,
    )

    decided = [x[0] for x in found[0]["results"]]
    num_parts = PARTS.get(shapes, NUM_PARTS)
    expected, model = emulated(options, norm, decided, num_parts=num_parts)
    for answer in found:
        frozen, layouts, losses, _ = zip(*answer["results"], strict=True)
        key = policy if policy in LAYOUTS and shapes == "recut" else shapes
        assert list(frozen) == NUM_FROZEN.get(key, list(frozen))
        assert any(frozen)
        if shapes == "chosen":
            assert {*layouts} <= {"2x1", "1x2"}
        else:
            assert list(layouts) == LAYOUTS[key]
        assert losses == pytest.approx(expected, rel=1e-10)
        state = answer["state"]
        for name, value in model.state_dict().items():
            got = torch.tensor(state[name], dtype=value.dtype)
            torch.testing.assert_close(got, value, rtol=1e-10, atol=1e-12)
    model.eval()
    with torch.no_grad():
        ends = [F.cross_entropy(model(x), y).item() for x, y in make_batches()]
    mean = sum(ends) / len(ends)
    assert found[0]["evaluated"] == pytest.approx(mean, rel=1e-10)


@pytest.mark.long  # test_resume.py compares averages in all shapes
@pytest.mark.parametrize("shapes", ["recut", "stays"])
def test_averages_move_on(tmp_path: Path, shapes: str) -> None:
    """Those of frozen layers, too, as in a loop that averages all weights."""
    arguments = [shapes, "averaged", "LayerNorm", "1f1b"]
    num_workers = 4 if shapes == "recut" else 2
    found = launch_forked(ENTRY, arguments, num_workers=num_workers, run_dir=tmp_path)

    averages = make_model().state_dict()
    for step in range(NUM_STEPS):
        model = emulated("averaged", "LayerNorm", NUM_FROZEN["recut"], step + 1)[1]
        for name, value in model.state_dict().items():
            averages[name] = averages[name].lerp(value, 1 - 0.9)
    for answer in found:
        for name, value in averages.items():
            got = torch.tensor(answer["averages"][name], dtype=value.dtype)
            torch.testing.assert_close(got, value, rtol=1e-10, atol=1e-12)


def test_decides_by_gradients(tmp_path: Path) -> None:
    """As a loop by hand does, which adds up each layer's gradients of two steps."""
    model = make_model(dropout=0.0)
    alone, batches = copy.deepcopy(model), make_batches()
    with started(
        model,
        F.cross_entropy,
        ADAMW,
        batches[0],
        num_microbatches=NUM_PARTS,
        freeze=POLICIES["gradients"],
        run_dir=tmp_path,
    ) as pipeline:
        found = [result.num_frozen for result in pipeline.train(batches)]

    optimizer, decider = ADAMW(alone.parameters()), Decider(POLICIES["gradients"], 8)
    expected = []
    sums = [[torch.zeros_like(p) for p in x.parameters()] for x in alone.blocks]
    for step, (x, y) in enumerate(batches):
        if step and step % 2 == 0:
            norms = [sum(s.abs().sum().item() for s in block) for block in sums]
            decider.ask(step, measured=tuple(norms))
            alone.stem.requires_grad_(requires_grad=not decider.num_frozen)
            for block in list(alone.blocks)[: decider.num_frozen]:
                block.requires_grad_(requires_grad=False)
            sums = [[torch.zeros_like(s) for s in block] for block in sums]
        expected.append(decider.num_frozen)
        F.cross_entropy(alone(x), y).backward()
        for block, total in zip(alone.blocks, sums, strict=True):
            for p, s in zip(block.parameters(), total, strict=True):
                s += 0 if p.grad is None else p.grad
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert found == expected
    assert found[-1] > 0


def test_the_loss_scale_stays(tmp_path: Path) -> None:
    """It counts the steps since it was last changed, over all layouts."""
    batch = torch.randn(8, 4), torch.randint(4, (8,))
    with started(
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))),
        F.cross_entropy,
        ADAMW,
        batch,
        freeze=hocket.freeze.Alpha(1 / 3, every_steps=1),
        precision="float16",
        run_dir=tmp_path,
    ) as pipeline:
        scaler = pipeline._executor.scaler
        assert scaler is not None
        scaler.update(2.0)  # no gradient overflows
        frozen = [pipeline.step(batch).num_frozen for _ in range(4)]
        scaler = pipeline._executor.scaler
        assert scaler is not None
        assert frozen == [0, 2, 3, 4]
        assert (scaler.get_scale(), scaler._get_growth_tracker()) == (2.0, 4)


def test_no_process_group_is_made_twice(tmp_path: Path) -> None:
    """None more after 20 changes between 2x1 and 1x2 than after the first two."""
    entry = "freezing_workers:train_many_layouts"
    for found in launch_forked(entry, num_workers=2, run_dir=tmp_path):
        layouts, groups, threads = zip(*found, strict=True)
        assert layouts == tuple(("2x1", "1x2")[n % 2] for n in range(21))
        assert len({*groups[2:]}) == 1
        assert len({*threads[2:]}) == 1


def test_an_epoch_whose_layout_changes_loses_no_sample(tmp_path: Path) -> None:
    """A SampleLoader gives the batches that a list of them gives, in both layouts.

    Past bug: after steps that changed nothing in the user's modules, the weights that
    another cut put there were taken for a change of the loop's, and refused.
    """
    entry = "freezing_workers:train_from_samples"
    for changing, fixed in launch_forked(entry, num_workers=2, run_dir=tmp_path):
        assert [x[0] for x in changing] == ["2x1"] * 4 + ["1x2"] * 4
        assert [x[0] for x in fixed] == ["2x1"] * 8
        losses = [x[1] for x in fixed]
        assert [x[1] for x in changing] == pytest.approx(losses, rel=1e-10)
