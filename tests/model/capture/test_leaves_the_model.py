"""A capture leaves the model as it was, also where libraries change it on first use.

SegFormer, which fails if there are too many hidden states, is one of the architectures
of tests/zoo/test_catalogue.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hocket.model.capture.capture import capture
from tests.model.support.model_snapshot import ModelSnapshot
from tests.zoo.catalogue.text import causal


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


def test_nothing_of_the_model_changes() -> None:
    """Hooks, attributes, flags, buffers; outputs are those of an untouched copy."""
    model = Busy()
    before = ModelSnapshot.of(model)

    capture(model, (), {"x": torch.randn(3, 4)})

    assert before.changes(model) == []


def test_as_many_hidden_states_as_before() -> None:
    """transformers 5 installs hooks at the first call that asks for them.

    They were counted once for each capture: 21 in the place of 5.
    """
    case = causal("Llama", num_hidden_layers=4)
    model, inputs = case.model, {**case.kwargs, "output_hidden_states": True}
    before = ModelSnapshot.of(model)

    captured = capture(model, (), inputs)

    assert before.changes(model) == []
    assert len(model(**inputs).hidden_states) == 5
    assert captured.any_batch
