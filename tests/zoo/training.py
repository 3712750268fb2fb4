"""What the workers of the zoo do: train each architecture in several cuts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hocket.model.capture import Captured, capture
from hocket.run.world import join_world
from tests.run.exactness import train_one
from tests.run.zoo import make_model


class Once:
    """Captures each model once, for all its runs: that takes longest here by far."""

    def __init__(self) -> None:
        self.found: dict[nn.Module, Captured] = {}

    def __call__(self, model: nn.Module, *args: Any, **kwargs: Any) -> Captured:
        if model not in self.found:
            self.found[model] = capture(model, *args, **kwargs)
        return self.found[model]


def train_all(
    names: list[str], cases: list[dict[str, Any]], folder: str
) -> list[list[dict[str, Any]]]:
    """The answers of all cases of each architecture, each from the same weights."""
    torch.set_num_threads(1)
    world = join_world()
    answers = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hocket.run.build.capture", Once())
        for name in names:
            model = make_model(name)
            start = copy.deepcopy(model.state_dict())
            runs = []
            for i, case in enumerate(cases):
                model.load_state_dict(start)
                model.train().zero_grad(set_to_none=True)
                run = {**case, "model": name, "cut": case["cuts"][name]}
                stem = Path(folder) / f"{name}-{i}"
                runs.append(train_one(world, run, stem, model))
            answers.append(runs)
    return answers
