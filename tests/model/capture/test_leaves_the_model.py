"""A capture leaves the model as it was, also where libraries change it on first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hocket.model.capture.capture import capture
from tests.model.support.model_snapshot import ModelSnapshot
from tests.zoo.catalogue import sight_and_sound
from tests.zoo.catalogue.text import causal

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
    case = causal("Llama", num_hidden_layers=4)
    return case.model, {**case.kwargs, "output_hidden_states": True}


def segformer() -> tuple[nn.Module, Keywords]:
    """Asks for hidden states itself, and fails if there are too many."""
    case = sight_and_sound.segformer()
    return case.model, case.kwargs


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
