"""What is planned for updates that may be undone is what they keep."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hocket.model.capture.capture import capture
from hocket.model.profile.optimizer_bytes import optimizer_bytes
from hocket.model.profile.work import layer_weights
from hocket.run.weights.settings import OptimizerFactory, Parameters, Settings
from hocket.run.weights.updater import Updater

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_planned_as_kept(name: str) -> None:
    """Weight, gradient and state of each parameter; nothing of frozen ones."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[2].requires_grad_(requires_grad=False)
    make = OPTIMIZERS[name]
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    states = optimizer_bytes(trained, lambda named: make(Parameters(named)))
    layers = layer_weights(
        capture(model, (torch.randn(5, 4),)), states, keeps_undo=True
    )
    updater = Updater(dict(model.named_parameters()), Settings(make))
    for _ in range(2):  # the first one makes the state
        for parameter in trained.values():
            parameter.grad = torch.ones_like(parameter)
        updater.doubt()
        updater.update()
        kept_bytes = updater.undo_bytes
        updater.confirm()

    assert sum(x.undo_bytes for layer in layers for x in layer) == kept_bytes
