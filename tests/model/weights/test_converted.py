"""Folders that the transformers library saves, as its `from_pretrained` reads them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from hocket.errors import ModelError
from hocket.model.trace.state import State
from hocket.model.weights.fresh import init
from hocket.model.weights.given import GivenWeights
from hocket.model.weights.stored import open_folder

transformers = pytest.importorskip("transformers")

_SMALL: Final = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
_GROUPED: Final = {**_SMALL, "num_key_value_heads": 2}
_CASES: Final[dict[str, dict[str, Any]]] = {
    "LlamaForCausalLM": _GROUPED,
    "Qwen3ForCausalLM": {**_GROUPED, "head_dim": 8, "tie_word_embeddings": True},
    "BertForMaskedLM": _SMALL,
    "MixtralForCausalLM": {**_GROUPED, "num_local_experts": 4},
    "T5ForConditionalGeneration": {
        "d_model": 32,
        "d_ff": 48,
        "d_kv": 8,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 64,
        "decoder_start_token_id": 0,
    },
}


def kind_of(name: str) -> Any:
    """The model's class."""
    return getattr(transformers, name)


def made(name: str) -> Any:
    """A small random one."""
    kind = kind_of(name)
    return kind(kind.config_class(**_CASES[name]))


def on_meta(name: str) -> Any:
    """The same without values."""
    with torch.device("meta"):
        return made(name)


@pytest.mark.parametrize("name", _CASES)
def test_all_tensors_are_what_from_pretrained_reads(name: str, tmp_path: Path) -> None:
    """Also where names and shapes differ in the files, and computed buffers."""
    torch.manual_seed(0)
    made(name).save_pretrained(tmp_path, max_shard_size="40KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    plain = State.of(kind_of(name).from_pretrained(tmp_path)).tensors
    model = on_meta(name)
    given = GivenWeights(model, open_folder(tmp_path))
    found = State.of(model).tensors
    given.hold([*found][:3])
    given.hold(found)
    assert found.keys() == plain.keys()
    assert [x for x in found if not torch.equal(found[x], plain[x])] == []


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "T5ForConditionalGeneration"])
def test_fresh_weights_are_those_of_the_constructor_if_asked(name: str) -> None:
    """And else as large, drawn by the model's own `_init_weights`."""
    torch.manual_seed(5)
    plain = State.of(made(name)).tensors
    for like in ("eager", None):
        model = on_meta(name)
        GivenWeights(model, init(5, like=like)).hold(plain)
        for key, x in State.of(model).tensors.items():
            if like:
                assert torch.equal(x, plain[key]), key
            elif x.numel() > 500:
                spread = float(plain[key].detach().std())
                assert float(x.detach().std()) == pytest.approx(spread, rel=0.15), key


def test_what_the_library_cannot_make_is_named(tmp_path: Path) -> None:
    """Here one of the experts' weights is missing."""
    model = made("MixtralForCausalLM")
    model.save_pretrained(tmp_path, max_shard_size="12KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    broken = on_meta("MixtralForCausalLM")
    opened = open_folder(tmp_path)
    gone = next(x for x in opened.forms if "experts.2.w1" in x)
    forms = {name: form for name, form in opened.forms.items() if name != gone}
    opened = replace(opened, forms=forms)
    with pytest.raises(ModelError, match=r"gate_up_proj"):
        GivenWeights(broken, opened)
    assert files
