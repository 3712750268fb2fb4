"""A run with old weights goes on from a checkpoint as if it had never stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

import hocket
from hocket.errors import DamagedError
from hocket.run.checkpoint import collect
from hocket.run.checkpoint.collect import WorkerShare
from hocket.run.checkpoint.export import open_one
from hocket.run.checkpoint.format.manifest import Section
from hocket.run.checkpoint.format.opened import read_tensors, verify
from tests.run.checkpoint.delayed import NUM_STEPS, SAVED_AT, bits, data_of
from tests.run.checkpoint.jobs import make_pipeline
from tests.run.support.forked import answers_of

FLUSH_FREE: Final = ("pipedream-2bw", "wpipe")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The sums in the same order everywhere, and the generator as it was."""
    torch.set_num_threads(1)
    kept = torch.get_rng_state()
    yield
    torch.set_rng_state(kept)


def alone(schedule: str, **more: Any) -> hocket.Pipeline:
    """A perceptron with dropout, on one device: cut at given layers."""
    cut = ["3"] if schedule in ("wpipe", "looped-bfs") else []
    case = {"model": "dropout", "schedule": schedule, "cut": cut, **more}
    return make_pipeline(None, case)


def data() -> list[Any]:
    """Its batches."""
    return data_of({"model": "dropout"})


def tensors(path: Path, section: Section) -> dict[str, Tensor]:
    """What a checkpoint holds of one kind, by name."""
    return read_tensors(open_one(path).locations(section))


def old_of(pipeline: hocket.Pipeline) -> dict[str, list[Tensor]]:
    """Of each delayed weight, the old ones that are kept: the oldest first."""
    kept = [x.versions.old() for x in pipeline._executor.runners.values() if x.versions]
    names = {name for old in kept for weights in old for name in weights}
    return {
        name: [w[name].clone() for old in kept for w in old if name in w]
        for name in names
    }


@pytest.mark.parametrize("schedule", FLUSH_FREE)
def test_resumed_at_any_step(schedule: str, tmp_path: Path) -> None:
    """Losses, weights and averages, with dropout, clipping and a schedule."""
    with alone(schedule) as pipeline:
        whole = [result.losses for result in pipeline.train(data())]
        end = pipeline.state_dict(), pipeline.state_dict(ema=True)
    with alone(schedule) as pipeline:
        for step, batch in enumerate(data()):
            pipeline.save(tmp_path, keep=None)
            assert pipeline.step(batch).losses == whole[step]

    with alone(schedule, seed=3) as pipeline:
        for stopped in (0, 1, SAVED_AT, NUM_STEPS - 1):
            pipeline.load(tmp_path, step=stopped)
            found = [result.losses for result in pipeline.train(data()[stopped:])]
            assert found == whole[stopped:], f"after {stopped}"
            states = pipeline.state_dict(), pipeline.state_dict(ema=True)
            for own, other in zip(states, end, strict=True):
                assert bits(own) == bits(other), f"after {stopped}"


def test_the_old_weights_are_the_ones_before_the_last_update(tmp_path: Path) -> None:
    """By the uncut model's names: of the front half, and of nothing else."""
    with alone("wpipe") as pipeline:
        for batch in data()[:3]:
            pipeline.save(tmp_path, keep=None)
            pipeline.step(batch)
        pipeline.save(tmp_path, keep=None)
        front = {n for n, _ in pipeline._executor.runners[0].module.named_parameters()}
    before = tensors(tmp_path / "step-00000002", Section.WEIGHTS)
    found = tensors(tmp_path / "step-00000003", Section.OLD)
    assert found.keys() == {f"{name}/1" for name in front}
    for name in front:
        assert torch.equal(found[f"{name}/1"], before[name])
    assert not tensors(tmp_path / "step-00000000", Section.OLD)
    newest = verify(tmp_path / "step-00000003")
    exported = hocket.checkpoint.read_weights(newest.path)
    assert exported.keys() == tensors(newest.path, Section.WEIGHTS).keys()


def test_into_an_order_with_other_delays(tmp_path: Path) -> None:
    """What is there is taken; where a weight was not delayed, the newest stands in.

    And back into one that flushes: it reads the newest weights, as it always does.
    """
    with alone("wpipe") as pipeline:
        list(pipeline.train(data()[:SAVED_AT]))
        pipeline.save(tmp_path)
    old = tensors(tmp_path, Section.OLD)
    newest = tensors(tmp_path, Section.WEIGHTS)
    with alone("pipedream-2bw") as pipeline:
        pipeline.load(tmp_path)
        found = old_of(pipeline)
        assert found.keys() == newest.keys()
        for name, [kept] in found.items():
            assert torch.equal(kept, old.get(f"{name}/1", newest[name])), name
    with alone("gpipe") as pipeline:
        pipeline.load(tmp_path)
        assert bits(pipeline.state_dict()) == bits(newest)
        assert pipeline.step(data()[SAVED_AT]).step == SAVED_AT


def test_a_flipped_bit_of_an_old_weight_is_found(tmp_path: Path) -> None:
    """Before anything changes; also by a pipeline that does not read it."""
    with alone("wpipe") as pipeline:
        list(pipeline.train(data()[:2]))
        pipeline.save(tmp_path)
    path = open_one(tmp_path).path / "old-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 8
    path.write_bytes(content)
    for schedule in ("wpipe", "looped-bfs"):
        with (
            alone(schedule) as pipeline,
            pytest.raises(DamagedError, match=r"old-0\.safetensors is damaged"),
        ):
            pipeline.load(tmp_path)


def test_a_checkpoint_of_the_first_version_still_loads(tmp_path: Path) -> None:
    """It knows no old weights: the newest are read in their place."""
    with alone("looped-bfs") as pipeline:
        list(pipeline.train(data()[:SAVED_AT]))
        pipeline.save(tmp_path)
    rewrite_as_first(open_one(tmp_path).path)
    (tmp_path / "latest").unlink()
    with alone("wpipe") as pipeline:
        pipeline.load(tmp_path, step=SAVED_AT)
        newest = pipeline.state_dict()
        for name, [kept] in old_of(pipeline).items():
            assert torch.equal(kept, newest[name])
        assert pipeline.step(data()[SAVED_AT]).step == SAVED_AT


def test_what_a_correction_kept_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of an earlier hocket may hold it; the run goes on without."""

    def with_kept(rank: int, replica: int, held: Any, *rest: Any) -> WorkerShare:
        kept = {Section.CORRECTION: dict(held[Section.OLD])}
        return WorkerShare(rank, replica, held | kept, *rest)

    monkeypatch.setattr(collect, "WorkerShare", with_kept)
    with alone("wpipe") as pipeline:
        list(pipeline.train(data()[:SAVED_AT]))
        pipeline.save(tmp_path)
        whole = pipeline.step(data()[SAVED_AT]).losses
    assert tensors(tmp_path, Section.CORRECTION)
    with alone("wpipe") as pipeline:
        pipeline.load(tmp_path)
        assert pipeline.step(data()[SAVED_AT]).losses == whole


def rewrite_as_first(path: Path) -> None:
    """As hocket wrote it before there were old weights."""
    manifest = json.loads((path / "manifest.json").read_text())
    for record in manifest["parts"]:
        part = json.loads((path / record["name"]).read_text())
        record["sha256"] = _write(path / record["name"], part)
    digest = _write(path / "manifest.json", manifest | {"version": 1})
    (path / "manifest.sha256").write_text(f"{digest}  manifest.json\n")


def _write(path: Path, value: Any) -> str:
    content = json.dumps(value).encode()
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


@pytest.mark.timeout(180)
def test_two_workers_with_several_steps_in_flight(tmp_path: Path) -> None:
    """Whole, saved on the way, resumed: the same bits.

    2BW goes on in 1F1B, too, and on one worker.
    Two devices, and two replicas of one. The copy of a weight that stages of different
    delays share is as old as the original, also among averages.
    """
    cases: list[dict[str, Any]] = [
        {"model": "dropout", "schedule": "wpipe"},
        {"model": "perceptron", "schedule": "pipedream-2bw", "other": "1f1b"},
        {"model": "perceptron", "schedule": "wpipe", "num_replicas": 2},
        {"model": "tied", "schedule": "wpipe"},
    ]
    reported, others = answers_of(
        "tests.run.checkpoint.delayed:save_and_load",
        [case | {"profiles": str(tmp_path / "profiles")} for case in cases],
        str(tmp_path),
        folder=tmp_path / "job",
        whole_s=120.0,
    )
    for case, found in zip(cases, reported, strict=True):
        for name in ("saved", "resumed"):
            assert found[name] == found["whole"], (case, name)
    for found, other in [*zip(reported, others, strict=True)][-1:]:
        shared = "embed.weight"
        assert found["whole"]["copies"][shared] == other["whole"]["copies"][shared]
        assert found["read"][0][shared] == other["read"][-1][shared]
        assert found["read"][0][shared] != found["saved"]["weights"][shared]

    with make_pipeline(None, cases[1]) as pipeline:  # the same delays on one worker
        pipeline.load(tmp_path / "1")
        alone = [x.losses for x in pipeline.train(data_of(cases[1])[SAVED_AT:])]
    for own, other in zip(
        reported[1]["whole"]["losses"][SAVED_AT:], alone, strict=True
    ):
        assert own == pytest.approx(other, rel=1e-10)

    with make_pipeline(None, cases[1] | {"schedule": "gpipe"}) as pipeline:
        pipeline.load(tmp_path / "1")
        expected = [x.losses for x in pipeline.train(data_of(cases[1])[SAVED_AT:])]
    losses = reported[1]["other"]["losses"]
    assert len(losses) == len(expected)
    for own, other in zip(losses, expected, strict=True):
        assert own == pytest.approx(other, rel=1e-10)
