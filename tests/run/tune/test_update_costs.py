"""An update is measured on a part of a large stage, where that stands for all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hocket.run.tune import update_costs
from hocket.run.weights.settings import TrainingConfig

CPU = torch.device("cpu")


def measured(optimizer: Any) -> dict[str, float]:
    """The costs of an update of ten equal layers, and a small one."""
    layers: Any = nn.ModuleDict({f"l{i}": nn.Linear(64, 64) for i in range(10)})
    layers["head"] = nn.Linear(64, 2)
    return update_costs._measured(layers, TrainingConfig(optimizer=optimizer), CPU, 0)


def test_a_part_stands_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of state are those of the whole, within the odd sizes of its tensors."""
    whole = measured(torch.optim.Adam)
    monkeypatch.setattr(update_costs, "_ENOUGH_BYTES", 1 << 15)
    part = measured(torch.optim.Adam)
    assert isinstance(part["optimizer_bytes"], int)
    assert part["optimizer_bytes"] == pytest.approx(whole["optimizer_bytes"], rel=0.02)
    assert part["update_s"] > 0


def test_an_optimizer_that_asks_for_a_name_gets_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A part may lack it, and the stage has it."""
    monkeypatch.setattr(update_costs, "_ENOUGH_BYTES", 1 << 10)
    seen = []

    def asking(parameters: Any) -> torch.optim.Optimizer:
        own = list(parameters)
        seen.append(len(own))
        if len(own) < 22:
            raise KeyError("l9.weight")
        return torch.optim.SGD(own, 0.1)

    assert measured(asking)["update_s"] > 0
    assert min(seen) < 22
    assert max(seen) == 22
