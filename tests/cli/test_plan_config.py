"""`hocket plan` of a model of the transformers library, by its config alone."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import hocket
from hocket.cli.main import app
from hocket.model.capture import capture as capturing
from hocket.model.capture.export import export
from hocket.run.tune import planning

transformers = pytest.importorskip("transformers")

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}


def written(folder: Path, kind: str, **more: Any) -> Path:
    """Write a small model's config, as `save_pretrained` does."""
    config = getattr(transformers, kind).config_class(**{**_SMALL, **more})
    config.architectures = [kind]
    config.save_pretrained(folder)
    return folder


def shell(*arguments: object) -> Result:
    """What `hocket plan` prints, and how it ends."""
    return CliRunner().invoke(app, ["plan", *map(str, arguments), "--devices", "2"])


def flat(text: str) -> str:
    """A text without its breaks of lines, and the frames of errors."""
    return " ".join(text.replace("│", " ").split())


def test_a_folder_with_a_config_is_planned(tmp_path: Path) -> None:
    """For tokens of any number; no weights are made, and none are needed."""
    folder = written(tmp_path, "LlamaForCausalLM")
    for path in (folder, folder / "config.json"):
        done = shell(path, "--hardware", "a100-80g", "--tokens", "8", "--json")
        assert done.exit_code == 0, done.output
    best = json.loads(done.stdout)
    assert "zb-h1" in done.stdout
    assert best


def test_only_training_is_exported_and_the_plan_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is counted is counted of training; evaluation takes as long to export."""
    folder = written(tmp_path, "LlamaForCausalLM", num_hidden_layers=4)
    modes: list[bool] = []

    def noted(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        modes.append(model.training)
        return export(model, *args, **kwargs)

    monkeypatch.setattr(capturing, "export", noted)
    given = (folder, "--hardware", "a100-80g", "--tokens", "8", "--json")
    alone = shell(*given)
    assert modes == [True]
    both = partial(capturing.capture, both=True)
    monkeypatch.setattr(planning, "capture", lambda *x, **_: both(*x))
    assert shell(*given).stdout == alone.stdout
    assert modes == [True, True, False]
    assert alone.exit_code == 0, alone.output


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "d_ff": 64}),
        ("ViTForImageClassification", {"image_size": 32, "patch_size": 16}),
    ],
)
def test_other_inputs_are_known(tmp_path: Path, kind: str, more: Any) -> None:
    """Two sequences, and images."""
    folder = written(tmp_path, kind, **more)
    done = shell(folder, "--hardware", "a100-80g")
    assert done.exit_code == 0, done.output
    assert kind in done.output


def test_a_file_of_another_name_is_the_one_that_is_read(tmp_path: Path) -> None:
    """Not the config.json beside it."""
    written(tmp_path, "LlamaForCausalLM")
    other = written(tmp_path / "other", "BertForMaskedLM") / "config.json"
    path = other.rename(tmp_path / "bert.json")
    done = shell(path, "--hardware", "a100-80g", "--tokens", "8")
    assert done.exit_code == 0, done.output
    assert "BertForMaskedLM" in done.output


@pytest.mark.parametrize(
    ("kind", "more", "why"),
    [
        ("ViTForImageClassification", {}, "--tokens has no effect"),
        ("BertForMaskedLM", {}, "--tokens 9999 is more than a BertForMaskedLM"),
        ("LlamaForCausalLM", {"architectures": ["Unknown"]}, "no attribute Unknown"),
    ],
)
def test_what_would_plan_another_model_is_refused(
    tmp_path: Path, kind: str, more: Any, why: str
) -> None:
    """Tokens that it does not read, too many of them, and classes of one's own."""
    folder = written(tmp_path, kind)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    done = shell(folder, "--hardware", "a100-80g", "--tokens", "9999")
    assert done.exit_code != 0
    assert why in flat(done.output)


def test_what_cannot_be_planned_is_named(tmp_path: Path) -> None:
    """With the way out."""
    folder = written(tmp_path, "LlamaForCausalLM")
    measured = shell(folder)
    assert "name the kind of device, such as --hardware" in flat(measured.output)
    (tmp_path / "config.json").write_text("{}")
    wrong = shell(folder, "--hardware", "a100-80g")
    assert "is no config that the transformers library makes" in flat(wrong.output)
    tokens = shell("bert-24", "--tokens", "8")
    assert "--tokens is for a config.json" in flat(tokens.output)
    assert "--set is for recipes" in flat(shell(folder, "--set", "a.b=1").output)


def test_a_model_on_meta_is_planned_as_one_with_weights() -> None:
    """Its code makes constants where its inputs are, and masks without values."""

    def loss(output: Any, targets: Tensor) -> Tensor:
        logits: Tensor = output["logits"]
        return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())

    ids = torch.zeros(4, 8, dtype=torch.long)
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            kind = transformers.LlamaForCausalLM
            model = kind(kind.config_class(**_SMALL, use_cache=False))
        batch = {"input_ids": ids}, ids
        ranking = hocket.plan(model, batch, loss, num_devices=2, hardware="a100-80g")
        found.append(ranking.to_json())
        assert {str(x.device) for x in model.parameters()} == {device}
    assert found[0] == found[1]
