"""Runs whose layers freeze are saved in any shape, and go on in any other."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

import hocket
from hocket.cli.main import app
from hocket.errors import DamagedError
from hocket.freeze import Alpha
from hocket.freeze.policy import Decider
from hocket.run.checkpoint.format.newest import find
from hocket.run.checkpoint.format.opened import open_checkpoint
from hocket.run.elastic.make import distance
from tests.run.support.forked import answers_of, run_forked
from tests.run.support.freezing_workers import (
    ADAMW,
    NUM_PARTS,
    NUM_STEPS,
    Model,
    emulated,
    forty_samples,
    lower,
    make_batches,
    make_model,
    make_pipeline,
    rest_of,
)
from tests.run.support.resuming_workers import KILLED_AT, PLASTICITY, SAVED_AT
from tests.run.support.started import started

WORKERS = "resuming_workers"
CASE = {"options": "all", "policy": "gradients", "shapes": "soon"}


def assert_equal(found: Any, whole: Any, first: int, *, averages: bool = True) -> None:
    """Losses from a step on, and weights and averages at the end."""
    losses = [x[2] for x in whole["results"][first:]]
    assert [x[2] for x in found["results"]] == pytest.approx(losses, rel=1e-10)
    frozen = [x[0] for x in whole["results"][first:]]
    assert [x[0] for x in found["results"]] == frozen
    for kind in ("state", "averages") if averages else ("state",):
        for name, value in whole[kind].items():
            got, expected = (
                torch.tensor(x).double() for x in (found[kind][name], value)
            )
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.timeout(300)
def test_any_shape_goes_on_in_any_other(tmp_path: Path) -> None:
    """Saved by four workers at three steps, also between two decisions of a policy.

    Four workers, two (also with layers that stay where they are) and one go on with
    weights, moments, schedule, averages and the
    gradients that the policy has added up; and so does a pipeline without freezing,
    where frozen layers train again with zero moments.
    """
    folder = tmp_path / "checkpoints"
    [whole, *resumed] = answers_of(
        f"{WORKERS}:save_and_resume",
        *(CASE, str(folder)),
        num_workers=4,
        folder=tmp_path / "four",
        whole_s=120.0,
    )[0]
    frozen = [x[0] for x in whole["results"]]
    layouts = [x[1] for x in whole["results"]]
    assert [layouts[x - 1] for x in SAVED_AT] == ["4x1", "2x2", "1x4"]
    assert 0 < frozen[SAVED_AT[1]] < frozen[SAVED_AT[2]] <= 8
    for first, found in zip(SAVED_AT, resumed, strict=True):
        assert [x[1] for x in found["results"]] == [
            x[1] for x in whole["results"][first:]
        ]
        assert_equal(found, whole, first)
    for first in SAVED_AT:
        once, again = (
            open_checkpoint(find(tmp_path / name, first)).manifest.run
            for name in ("checkpoints", "checkpoints again")
        )
        assert once == again
        assert once.freezing is not None
        names = tuple(f"blocks.{i}" for i in range(frozen[first - 1]))
        assert once.freezing.layers == names

    on_two = answers_of(
        f"{WORKERS}:resume_on_two", *(CASE, str(folder)), folder=tmp_path / "two"
    )[0]
    for first, found in zip(SAVED_AT[1:], on_two, strict=True):
        assert_equal(found, whole, first)
    first = SAVED_AT[2]
    options: dict[str, Any] = {"profile_dir": tmp_path / "profiles"}
    for place in (folder, tmp_path / "checkpoints of two"):
        with make_pipeline({**CASE, "shapes": "fixed"}, **options) as pipeline:
            assert pipeline.load(place, step=first) == first
            assert_equal(rest_of(pipeline, first), whole, first)
    first = SAVED_AT[1]
    options |= {"freeze": None, "shapes": None}
    with make_pipeline(CASE, **options) as pipeline:
        pipeline.load(folder, step=first)
        found = rest_of(pipeline, first)
    given = [*frozen[:first], *[0] * (NUM_STEPS - first)]
    losses, model = emulated("all", "LayerNorm", given)
    assert [x[2] for x in found["results"]] == pytest.approx(losses[first:], 1e-10)
    for name, value in model.state_dict().items():
        got = torch.tensor(found["state"][name], dtype=value.dtype)
        torch.testing.assert_close(got, value, rtol=1e-10, atol=1e-12)


def test_freezes_what_was_trained_without_a_policy(tmp_path: Path) -> None:
    """A checkpoint of a run without freezing goes on with it."""
    case = {"options": "all", "policy": "alpha", "shapes": "fixed"}
    with make_pipeline(case, freeze=None, shapes=None) as pipeline:
        for batch in make_batches()[:2]:
            pipeline.step(batch)
        pipeline.save(tmp_path / "checkpoints")
    with make_pipeline(case) as pipeline:
        for batch in make_batches()[:3]:
            pipeline.step(batch)  # freezes layers, which train again after the load
        pipeline.load(tmp_path / "checkpoints")
        found = rest_of(pipeline, 2)
    losses, model = emulated("all", "LayerNorm", [0, 0, 4, 4, 6, 6, 7, 7, 8])
    assert [x[2] for x in found["results"]] == pytest.approx(losses[2:], rel=1e-10)
    for name, value in model.state_dict().items():
        got = torch.tensor(found["state"][name], dtype=value.dtype)
        torch.testing.assert_close(got, value, rtol=1e-10, atol=1e-12)


def test_a_damaged_checkpoint_changes_nothing(tmp_path: Path) -> None:
    """Not the frozen layers, nor a weight; training goes on as without the load."""
    case = {"options": "all", "policy": "alpha", "shapes": "fixed"}
    batches, folder = make_batches(), tmp_path / "checkpoints"
    with make_pipeline(case) as pipeline:
        for batch in batches[:5]:
            pipeline.step(batch)
        pipeline.save(folder)  # with 6 frozen layers
    shown = CliRunner().invoke(app, ["checkpoint", "show", str(folder)]).output
    assert f"frozen: {', '.join(f'blocks.{i}' for i in range(6))}" in shown
    [weights] = find(folder, "latest").glob("weights-0.*")
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x77")
    with make_pipeline(case) as pipeline:
        before = [pipeline.step(batch).num_frozen for batch in batches[:3]]
        with pytest.raises(DamagedError):
            pipeline.load(folder)
        found = rest_of(pipeline, 3)
    assert before == [0, 0, 4]
    expected, _ = emulated("all", "LayerNorm", [0, 0, 4, 4, 6, 6, 7, 7, 8])
    assert [x[2] for x in found["results"]] == pytest.approx(expected[3:], rel=1e-10)


def test_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """A loader's position comes back, and the end of the epoch is a decision's step."""
    loader = hocket.SampleLoader(forty_samples(), 8, seed=2)

    def make() -> hocket.Pipeline:
        torch.manual_seed(0)
        return started(
            nn.Sequential(*(nn.Linear(4, 4) for _ in range(7))).double(),
            F.cross_entropy,
            ADAMW,
            loader.example(),
            freeze=Alpha(1 / 4),
            run_dir=tmp_path,
        )

    def rest(pipeline: hocket.Pipeline, loader: hocket.SampleLoader) -> list[Any]:
        epochs = [[*pipeline.train(loader)] for _ in range(2)]
        return [(x.step, x.num_frozen, x.loss) for epoch in epochs for x in epoch]

    with make() as pipeline:
        for result in pipeline.train(loader):
            if result.step == 2:
                pipeline.save(tmp_path / "a", data=loader.state_dict())
            if result.step == 4:  # the epoch's last
                pipeline.save(tmp_path / "b", data=loader.state_dict())
        pipeline.save(tmp_path / "c", data=loader.state_dict())
        whole = rest(pipeline, loader)
    for folder, num_left in (("a", 2), ("b", 0), ("c", 0)):
        again = hocket.SampleLoader(forty_samples(), 8, seed=2)
        with make() as pipeline:
            again.load_state_dict(pipeline.load(tmp_path / folder))
            for _ in range(num_left and 1):
                assert len([*pipeline.train(again)]) == num_left
            assert rest(pipeline, again) == whole


def test_killed_in_a_transition(tmp_path: Path) -> None:
    """The other worker ends at once; one worker goes on from the last checkpoint."""
    folder = tmp_path / "job" / "checkpoints"
    folder.parent.mkdir()
    outcome = run_forked(
        f"{WORKERS}:die_in_transition",
        str(folder),
        folder=folder.parent,
        timeout_s=20.0,
    )
    assert outcome.codes[1] == -9
    assert outcome.codes[0] not in {0, None}
    assert not outcome.hung
    assert outcome.after_s[0] < 10.0, outcome.after_s
    assert "while layers move between workers" in outcome.reports[0].message
    case = {"options": "all", "policy": "there and back", "shapes": "fixed"}
    with make_pipeline(case) as pipeline:
        assert pipeline.load(folder) == KILLED_AT
        found = rest_of(pipeline, KILLED_AT)
    assert [x[0] for x in found["results"]] == [6, 6, 2, 2, 7]
    losses, _ = emulated("all", "LayerNorm", [0, 0, 4, 4, 6, 6, 2, 2, 7])
    assert [x[2] for x in found["results"]] == pytest.approx(
        losses[KILLED_AT:], rel=1e-10
    )


def test_all_workers_raise_what_rank_0_cannot_decide(tmp_path: Path) -> None:
    """A policy's own mistake, and layers that would not fit if they trained again.

    Two workers measure activations as one process does, and two replicas keep their own
    statistics of batch norms, also of frozen ones.
    """
    found = answers_of(f"{WORKERS}:errors_and_activations", folder=tmp_path / "job")
    assert found[0]["policy fails"] == "ZeroDivisionError: the user's own mistake"
    for text in (found[1]["policy fails"], found[1]["no way back"]):
        assert text.startswith("RunError: rank 0 cannot choose the layers to freeze")
    assert "the user's own mistake" in found[1]["policy fails"]
    text = found[0]["no way back"]
    assert "Listed unfreezes layers (4 to 0 frozen)" in text
    # Which shape needs the least follows from the cut, and the cut from measured times:
    # another one than the one that is asked for, or that one itself.
    other = r"memory_bytes is 1; of all shapes, \dx\d needs the least"
    same = r"no shape fits memory_bytes 1: \dx\d \(stages x replicas\) needs the least"
    assert re.search(f"{other}|{same}", text), text
    expected = frozen_by_hand()
    assert [x[0] for x in found[0]["activations"]] == expected
    assert 0 in expected[expected.index(1) :]

    frozen = [0, 0, 4, 4, 6, 6, 7, 7, 8]
    losses, _ = emulated("plain", "BatchNorm1d", frozen, num_replicas=2)
    results = found[0]["batch norms"]["results"]
    assert [x[0] for x in results] == frozen
    assert [x[2] for x in results] == pytest.approx(losses, rel=1e-10)


def frozen_by_hand() -> list[int]:
    """Freeze by activations in a plain loop, and unfreeze with zero moments."""
    model = make_model(dropout=0.0)
    optimizer = ADAMW(model.parameters())
    schedule = lower(optimizer)
    decider, found, reference = Decider(PLASTICITY, 8), [], copy.deepcopy(model)
    for step, (x, y) in enumerate(make_batches()):
        if step:
            part = x.tensor_split(NUM_PARTS)[0]
            both = activations(model, part), activations(reference, part)
            apart = [distance([a], [b]) for a, b in zip(*both, strict=True)]
            decider.ask(step, optimizer.param_groups[0]["lr"], tuple(apart))
            freeze(model, decider.num_frozen, optimizer)
            reference = copy.deepcopy(model)
        found.append(decider.num_frozen)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return found


def freeze(model: Model, num_frozen: int, optimizer: torch.optim.Optimizer) -> None:
    """Freeze the first blocks and the stem; what trains again has zero moments."""
    for i, module in enumerate([model.stem, *model.blocks]):
        trains = max(0, i - 1) >= num_frozen
        for parameter in module.parameters():
            if trains and not parameter.requires_grad:
                optimizer.state.pop(parameter, None)
            parameter.requires_grad_(trains)


def activations(model: Model, x: Tensor) -> list[Tensor]:
    """The output of each block in evaluation mode."""
    model.eval()
    with torch.no_grad():
        x = model.stem(x)
        return [x := block(x) for block in model.blocks]
