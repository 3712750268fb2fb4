"""A capture leaves the model as it was, also where libraries change it on first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    SegformerConfig,
    SegformerForSemanticSegmentation,
)

from hocket.model.capture.capture import capture
from tests.model.support.model_snapshot import ModelSnapshot

Keywords = dict[str, Any]


class Busy(nn.Module):
    """Its first forward installs a hook, takes notes in a list and adds a module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.notes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.notes:
            self.linear.register_forward_hook(lambda *_: None)
            self.linear.more = nn.Identity()
        self.notes.append(1)
        y: Tensor = self.linear(x)
        return y


def busy() -> tuple[nn.Module, Keywords]:
    """Needs no library."""
    return Busy(), {"x": torch.randn(3, 4)}


def llama() -> tuple[nn.Module, Keywords]:
    """transformers 5 installs hooks at the first call that asks for hidden states."""
    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        vocab_size=11,
    )
    inputs = {"input_ids": torch.randint(11, (3, 7)), "use_cache": False}
    return LlamaForCausalLM(config), {**inputs, "output_hidden_states": True}


def segformer() -> tuple[nn.Module, Keywords]:
    """Asks for hidden states itself, and fails if there are too many."""
    config = SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        decoder_hidden_size=16,
    )
    model = SegformerForSemanticSegmentation(config)
    return model, {"pixel_values": torch.randn(3, 3, 16, 16)}


@pytest.mark.parametrize("make", [busy, llama, segformer])
def test_nothing_of_the_model_changes(
    make: Callable[[], tuple[nn.Module, Keywords]],
) -> None:
    """Hooks, attributes, flags, buffers; outputs are those of an untouched copy."""
    model, inputs = make()
    before = ModelSnapshot.of(model)

    capture(model, (), inputs)

    assert before.changes(model) == []


def test_as_many_hidden_states_as_before() -> None:
    """They were counted once for each capture: 21 in the place of 5."""
    model, inputs = llama()

    captured = capture(model, (), inputs)

    assert len(model(**inputs).hidden_states) == 5
    assert captured.any_batch
