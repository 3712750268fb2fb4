"""Weights go out in each form, and come in by the model."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

import hocket
from hocket.errors import CheckpointError, DamagedError
from hocket.run.checkpoint.collect import WorkerShare
from hocket.run.checkpoint.commit import SaveJob, commit
from hocket.run.checkpoint.export import open_one
from hocket.run.checkpoint.format.manifest import RunRecord, Section
from tests.run.checkpoint.jobs import data_of, make_pipeline
from tests.run.checkpoint.made import alone
from tests.run.support.plainly import SGD
from tests.run.support.small_models import make_model
from tests.run.support.started import started


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's checkpoints: a model with tied weights, trained for two steps."""
    folder = tmp_path_factory.mktemp("run")
    case = {"model": "tied"}
    with make_pipeline(None, case) as pipeline:
        for batch in data_of(case)[:2]:
            pipeline.step(batch)
        pipeline.save(folder)
        torch.save(pipeline.state_dict(), folder / "expected.pt")
        torch.save(pipeline.state_dict(ema=True), folder / "averaged.pt")
    return folder


def expected(run: Path, name: str = "expected") -> dict[str, Tensor]:
    """What the pipeline said that it held."""
    state: dict[str, Tensor] = torch.load(run / f"{name}.pt", weights_only=True)
    return state


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Equal names, and tensors bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_weights_as_a_state_dict(run: Path) -> None:
    """With every name of the tied weight, as the uncut model has them."""
    assert same(hocket.checkpoint.read_weights(run), expected(run))
    averaged = hocket.checkpoint.read_weights(run, averaged=True)
    assert same(averaged, expected(run, "averaged"))
    assert not same(averaged, expected(run))
    make_model("tied").load_state_dict(averaged, strict=True)


def test_one_safetensors_file(run: Path, tmp_path: Path) -> None:
    """The tied weight once; safetensors' own loader ties it again."""
    target = tmp_path / "model.safetensors"
    assert hocket.checkpoint.export(run, target) == [target]
    found = load_file(target)
    assert "head.weight" not in found
    assert same(found, {k: v for k, v in expected(run).items() if k != "head.weight"})
    model = make_model("tied")
    load_model(model, target)
    assert same(dict(model.state_dict()), expected(run))


def test_several_safetensors_files(run: Path, tmp_path: Path) -> None:
    """None larger than asked for, and an index as the Hugging Face hub has it."""
    paths = hocket.checkpoint.export(
        run, tmp_path / "m.safetensors", max_file_bytes=2000
    )
    index = json.loads((tmp_path / "m.safetensors.index.json").read_text())
    files = [path for path in paths if path.suffix == ".safetensors"]
    assert len(files) > 2
    assert files[0].name == f"m-00001-of-{len(files):05d}.safetensors"
    found: dict[str, Tensor] = {}
    for path in files:
        tensors = load_file(path)
        assert sum(x.nbytes for x in tensors.values()) <= 2000
        assert all(index["weight_map"][name] == path.name for name in tensors)
        found |= tensors
    assert sum(x.nbytes for x in found.values()) == index["metadata"]["total_size"]
    assert same(found, {k: v for k, v in expected(run).items() if k != "head.weight"})


def test_torch_and_distributed(run: Path, tmp_path: Path) -> None:
    """Both read by torch itself."""
    hocket.checkpoint.export(run, tmp_path / "m.pt", "pt")
    assert same(torch.load(tmp_path / "m.pt", weights_only=True), expected(run))
    hocket.checkpoint.export(run, tmp_path / "dcp", "dcp")
    state = {name: torch.zeros_like(x) for name, x in expected(run).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same(state, expected(run))


def test_nothing_is_written_over_and_damage_is_not_passed_on(
    run: Path, tmp_path: Path
) -> None:
    """Half an export is never left."""
    target = tmp_path / "m.safetensors"
    target.write_text("mine")
    with pytest.raises(CheckpointError, match="exists already"):
        hocket.checkpoint.export(run, target)
    path = open_one(run).path / "weights-0.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    forms: list[Literal["safetensors", "pt", "dcp"]] = ["safetensors", "pt", "dcp"]
    for form in forms:
        with pytest.raises(DamagedError, match="weights-0"):
            hocket.checkpoint.export(run, tmp_path / "new", form)
    path.write_bytes(good)
    assert [x.name for x in tmp_path.iterdir()] == ["m.safetensors"]


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    """A model made from its config goes through a pipeline and `from_pretrained`."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=40, n_positions=16
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    words = torch.randint(40, (4, 8))

    def loss(output: Any, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            output.logits.flatten(0, 1), targets.flatten()
        )

    with started(
        model, loss, SGD, ({"input_ids": words, "use_cache": False}, words)
    ) as pipeline:
        pipeline.step(({"input_ids": words, "use_cache": False}, words))
        pipeline.save(tmp_path / "run")
        state = pipeline.state_dict()
    hocket.checkpoint.export(tmp_path / "run", tmp_path / "gpt2", "hf")
    found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2")
    assert same(dict(found.state_dict()), state)
    automatic = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2")
    assert type(automatic) is type(model)


def test_a_model_without_config_becomes_no_such_folder(
    run: Path, tmp_path: Path
) -> None:
    """The error says what to take instead."""
    with pytest.raises(CheckpointError, match="take safetensors"):
        hocket.checkpoint.export(run, tmp_path / "x", "hf")
    assert not (tmp_path / "x").exists()


def into(model: nn.Module, state: dict[str, Tensor]) -> None:
    """The state dict alone, with a tied weight under one name or under both."""
    missing = model.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"head.weight"}


def from_safetensors(state: dict[str, Tensor], model: nn.Module, folder: Path) -> None:
    """Without the tied name, as safetensors wants it."""
    path = folder / "m.safetensors"
    save_file({k: v for k, v in state.items() if k != "head.weight"}, path)
    into(model, load_file(path))


def from_torch(state: dict[str, Tensor], model: nn.Module, folder: Path) -> None:
    """The state dict beside other things."""
    torch.save({"model": state, "epoch": 3}, folder / "m.pt")
    into(model, torch.load(folder / "m.pt", weights_only=True)["model"])


def from_distributed(state: dict[str, Tensor], model: nn.Module, folder: Path) -> None:
    """By torch.distributed.checkpoint, which fills the tensors of the model itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(dict(state), checkpoint_id=folder / "dcp", no_dist=True)
        dcp.load(model.state_dict(), checkpoint_id=folder / "dcp", no_dist=True)


@pytest.mark.parametrize("load", [from_safetensors, from_torch, from_distributed])
def test_weights_of_other_programs(
    load: Callable[[dict[str, Tensor], nn.Module, Path], None],
    run: Path,
    tmp_path: Path,
) -> None:
    """They are put into the plain model; a pipeline made of it trains from there."""
    model = make_model("tied")
    load(expected(run), model, tmp_path)
    case = {"model": "tied"}
    with make_pipeline(None, case, model) as pipeline:
        assert same(pipeline.state_dict(), expected(run))
        assert pipeline.step(data_of(case)[0]).step == 0
        pipeline.save(tmp_path / "run")
    assert [x.name[-1] for x in hocket.checkpoint.saved(tmp_path / "run")] == ["1"]


def test_a_checkpoint_with_weights_alone_is_refused(tmp_path: Path) -> None:
    """Earlier versions made such ones of other programs' files; the way out is named.

    Its weights are read as those of any other.
    """
    case = {"model": "tied"}
    with make_pipeline(None, case) as pipeline:
        pipeline.step(data_of(case)[0])
        state = pipeline.state_dict()
        pipeline.save(tmp_path)
    share = WorkerShare(0, 0, {Section.WEIGHTS: dict(state)}, (), {})
    job = SaveJob(tmp_path, RunRecord(step=0, has_averages=True), None)
    path = commit(job, lambda: share, alone())
    with (
        make_pipeline(None, case) as pipeline,
        pytest.raises(CheckpointError, match=r"not trained .*read_weights\) into"),
    ):
        pipeline.load(tmp_path)
    assert same(hocket.checkpoint.read_weights(path), state)
