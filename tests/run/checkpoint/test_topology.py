"""A checkpoint of two workers goes on with one, three, or two replicas of two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.run.checkpoint.export import open_one
from hocket.run.checkpoint.format.manifest import Section
from hocket.run.checkpoint.format.opened import read_tensors, verify
from tests.run.checkpoint.jobs import SAVED_AT
from tests.run.support.forked import answers_of, run_forked

JOBS = "tests.run.checkpoint.jobs"
Other = tuple[int, dict[str, Any]]  # workers, and what else differs
SAME: Other = (2, {})
OTHERS: dict[str, list[Other]] = {
    "tied": [
        (1, {"schedule": "gpipe"}),
        (4, {"schedule": "gpipe", "num_replicas": 2, "num_microbatches": 2}),
    ],
    "tied-dropout": [(3, {"schedule": "1f1b"})],
    "resnet": [SAME, (2, {"schedule": "interleaved-1f1b", "stages_per_device": 2})],
}


def job(
    entry: str, num_workers: int, folder: Path, *arguments: Any
) -> list[dict[str, Any]]:
    """What each worker returns."""
    return answers_of(
        f"{JOBS}:{entry}", *arguments, num_workers=num_workers, folder=folder
    )


def everything(folder: Path) -> dict[tuple[Section, str], Tensor]:
    """Each tensor of a run by what it is, wherever it was written."""
    opened = open_one(folder)
    sections = (Section.WEIGHTS, Section.AVERAGED, Section.OPTIMIZER)
    return read_tensors(
        {
            (section, name): place
            for section in sections
            for name, place in opened.locations(section).items()
        }
    )


@pytest.mark.parametrize(
    "model", [pytest.param(x, marks=[pytest.mark.long] * (x != "tied")) for x in OTHERS]
)
@pytest.mark.timeout(240)
def test_any_number_of_workers_goes_on(model: str, tmp_path: Path) -> None:
    """All state bit for bit, also the optimizer's; then the same losses."""
    folder = tmp_path / "checkpoints"
    case = {"model": model, "profiles": str(tmp_path / "profiles")}
    [whole, _] = job("train_and_save", 2, tmp_path / "a", case, str(folder))
    verify(open_one(folder).path)
    saved = everything(folder)

    for i, (num_workers, more) in enumerate(OTHERS[model]):
        again = tmp_path / f"again-{i}"
        [found, *_] = job(
            "load_and_train",
            num_workers,
            tmp_path / f"job-{i}",
            case | more,
            str(folder),
            str(again),
        )
        label = f"{num_workers} workers, {more}"
        kept = everything(again)
        assert kept.keys() == saved.keys(), label
        for key, value in saved.items():
            assert torch.equal(kept[key], value), f"{label}: {key}"
        assert found["losses"] == pytest.approx(whole["losses"][SAVED_AT:], rel=1e-10)
        if (num_workers, more) == SAME:
            assert found == whole | {"losses": whole["losses"][SAVED_AT:]}


@pytest.mark.timeout(120)
def test_replicas_write_once_and_keep_their_own_statistics(tmp_path: Path) -> None:
    """Weights are those of the first replica; BatchNorm's means are each one's own."""
    folder = tmp_path / "checkpoints"
    case = {"model": "resnet", "num_replicas": 2, "num_microbatches": 2}
    whole = job("train_and_save", 2, tmp_path / "a", case, str(folder))
    opened = open_one(folder)
    weights = [file for _, file in opened.files(Section.WEIGHTS)]
    others = [file for _, file in opened.files(Section.REPLICA)]
    assert [file.name for file in weights] == ["weights-0.safetensors"]
    assert [file.name for file in others] == ["replica-1.safetensors"]
    assert all("running" in x or "num_batches" in x for x in others[0].tensors)

    found = job(
        "load_and_train", 2, tmp_path / "b", case, str(folder), str(tmp_path / "again")
    )
    assert [x["evaluated"] for x in found] == [x["evaluated"] for x in whole]
    assert [x["weights"] for x in found] == [x["weights"] for x in whole]


@pytest.mark.timeout(120)
def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    """By the first of their holders, under their first name."""
    folder = tmp_path / "checkpoints"
    case = {"model": "tied", "background": True}
    job("train_and_save", 2, tmp_path / "a", case, str(folder))
    opened = open_one(folder)
    names = [x for _, file in opened.files(Section.WEIGHTS) for x in file.tensors]
    assert len(names) == len(set(names))
    assert "embed.weight" in names
    assert "head.weight" not in names
    assert opened.manifest.run.ties == {"embed.weight": ("head.weight",)}
    assert {part.rank for part in opened.parts} == {0, 1}


@pytest.mark.timeout(120)
def test_a_worker_that_cannot_write_stops_no_other(tmp_path: Path) -> None:
    """All workers get the same error, the checkpoint before stays, training goes on."""
    folder = tmp_path / "checkpoints"
    reported = job(
        "one_cannot_write", 2, tmp_path / "a", {"model": "tied"}, str(folder)
    )
    errors, losses = zip(*(reported_of(x) for x in reported), strict=True)
    assert errors[0] == errors[1]
    assert [bool(error) for error in errors[0]] == [False, False, True, False, False]
    assert "rank 1 cannot write" in errors[0][2]
    assert "No space left on device" in errors[0][2]
    assert losses[0] == losses[1]
    names = {path.name for path in folder.iterdir()}
    steps = {f"step-{step:08d}" for step in (0, 1, 3, 4)}
    assert names == {"latest", "lock"} | steps


def reported_of(reported: Any) -> tuple[list[str], list[float]]:
    """Errors and losses of `one_cannot_write`."""
    return reported[0::2], reported[1::2]


@pytest.mark.timeout(120)
def test_a_killed_worker_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """The one before: not every worker had confirmed the last."""
    folder = tmp_path / "job" / "checkpoints"
    folder.parent.mkdir()
    outcome = run_forked(
        f"{JOBS}:die_while_others_write",
        {"model": "tied"},
        str(folder),
        folder=folder.parent,
        timeout_s=6.0,
        limit_s=30.0,  # the one left may notice only by its timeout
    )
    assert outcome.codes[1] == -9
    assert outcome.codes[0] not in {0, None}
    assert not outcome.hung
    opened = verify(open_one(folder).path)
    assert opened.manifest.run.data in {1, 2}
