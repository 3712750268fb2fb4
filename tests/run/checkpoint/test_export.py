"""Weights go out and come in, in each form; what could run code never comes in."""

from __future__ import annotations

import io
import json
import os
import pickle
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
from hocket.run.checkpoint.exchange.dcp import read_dcp
from hocket.run.checkpoint.exchange.export import open_one
from tests.run.checkpoint.jobs import data_of, make_pipeline
from tests.run.support.small_models import make_model


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

    with hocket.Pipeline(
        model,
        loss,
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        example=({"input_ids": words, "use_cache": False}, words),
        num_microbatches=2,
    ) as pipeline:
        pipeline.step(({"input_ids": words, "use_cache": False}, words))
        pipeline.save(tmp_path / "run")
        state = pipeline.state_dict()
    hocket.checkpoint.export(tmp_path / "run", tmp_path / "gpt2", "hf")
    found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2")
    assert same(dict(found.state_dict()), state)
    automatic = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2")
    assert type(automatic) is type(model)

    found.save_pretrained(tmp_path / "theirs")
    imported = hocket.checkpoint.import_weights(tmp_path / "theirs", tmp_path / "in")
    hocket.checkpoint.export(imported, tmp_path / "again", "hf")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert same(dict(again.state_dict()), state)


def test_a_model_without_config_becomes_no_such_folder(
    run: Path, tmp_path: Path
) -> None:
    """The error says what to take instead."""
    with pytest.raises(CheckpointError, match="take safetensors"):
        hocket.checkpoint.export(run, tmp_path / "x", "hf")
    assert not (tmp_path / "x").exists()


def as_safetensors(state: dict[str, Tensor], folder: Path) -> Path:
    """Without the tied name, as safetensors wants it."""
    path = folder / "m.safetensors"
    save_file({k: v for k, v in state.items() if k != "head.weight"}, path)
    return path


def as_torch(state: dict[str, Tensor], folder: Path) -> Path:
    """The state dict alone."""
    torch.save(state, folder / "m.pt")
    return folder / "m.pt"


def save_dcp(state: dict[str, Tensor], folder: Path) -> None:
    """As torch does it, which warns that one process is all there is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(dict(state), checkpoint_id=folder, no_dist=True)


def as_distributed(state: dict[str, Tensor], folder: Path) -> Path:
    """By torch.distributed.checkpoint."""
    save_dcp(state, folder / "dcp")
    return folder / "dcp"


@pytest.mark.parametrize("write", [as_safetensors, as_torch, as_distributed])
def test_weights_of_other_programs(
    write: Callable[[dict[str, Tensor], Path], Path], run: Path, tmp_path: Path
) -> None:
    """They come in as a checkpoint of step 0; a pipeline trains from there."""
    state = expected(run)
    folder = tmp_path / "run"
    path = hocket.checkpoint.import_weights(write(state, tmp_path), folder)
    hocket.checkpoint.verify(path)
    assert path == hocket.checkpoint.newest(folder)
    case = {"model": "tied"}
    with make_pipeline(None, case) as pipeline:
        assert pipeline.load(folder) is None
        assert same(pipeline.state_dict(), state)
        assert pipeline.step(data_of(case)[0]).step == 0
        pipeline.save(folder)
    assert [x.name[-1] for x in hocket.checkpoint.saved(folder)] == ["0", "1"]


def test_weights_beside_other_things(run: Path, tmp_path: Path) -> None:
    """A prefix takes what lies below it; without, the error says what there is."""
    source = tmp_path / "all.pt"
    torch.save({"model": expected(run), "epoch": 3, "args": {"lr": 0.1}}, source)
    with pytest.raises(CheckpointError, match=r"more than tensors .*epoch, args\.lr"):
        hocket.checkpoint.import_weights(source, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"no tensors under 'net\.'"):
        hocket.checkpoint.import_weights(source, tmp_path / "run", prefix="net.")
    path = hocket.checkpoint.import_weights(source, tmp_path / "run", prefix="model.")
    found = hocket.checkpoint.read_weights(path)
    assert same(found, expected(run))


class Evil:
    """Unpickled, it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.mark),))


def evil_torch(folder: Path, mark: Path) -> Path:
    """A call in a torch file."""
    torch.save({"w": torch.ones(2), "x": Evil(mark)}, folder / "evil.pt")
    return folder / "evil.pt"


def evil_pickle(folder: Path, mark: Path) -> Path:
    """A bare pickle under torch's name."""
    (folder / "evil.bin").write_bytes(pickle.dumps(Evil(mark)))
    return folder / "evil.bin"


def evil_metadata(folder: Path, mark: Path) -> Path:
    """A call in the metadata of DCP."""
    save_dcp({"w": torch.ones(2)}, folder / "dcp")
    (folder / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    return folder / "dcp"


def evil_tensor(folder: Path, mark: Path) -> Path:
    """A call where DCP's metadata promise a tensor."""
    save_dcp({"w": torch.ones(2)}, folder / "dcp")
    [file] = (folder / "dcp").glob("*.distcp")
    content = io.BytesIO()
    torch.save(Evil(mark), content)
    size = file.stat().st_size
    file.write_bytes(content.getvalue()[:size].ljust(size, b"\0"))
    return folder / "dcp"


@pytest.mark.parametrize("make", [evil_torch, evil_pickle, evil_metadata, evil_tensor])
def test_nothing_that_is_read_runs_code(
    make: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    """Refused with our own error, never read in an unsafe way instead."""
    mark = tmp_path / "ran"
    source = make(tmp_path, mark)
    with pytest.raises(CheckpointError):
        hocket.checkpoint.import_weights(source, tmp_path / "run")
    assert not mark.exists()
    assert not list((tmp_path / "run").glob("step-*"))


def test_metadata_that_lead_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    """A file name with a path in it."""
    save_dcp({"w": torch.ones(2)}, tmp_path / "dcp")
    metadata = tmp_path / "dcp" / ".metadata"
    [file] = (tmp_path / "dcp").glob("*.distcp")
    assert read_dcp(tmp_path / "dcp")["w"].tolist() == [1.0, 1.0]
    name = file.name.encode()
    content = metadata.read_bytes()
    assert content.count(name) >= 1
    metadata.write_bytes(content.replace(name, b"../" + name[3:]))
    with pytest.raises(CheckpointError, match="no file of this folder"):
        read_dcp(tmp_path / "dcp")
