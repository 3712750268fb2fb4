"""What the fork server has done when the first worker is forked from it.

A worker would import torch, torch's compiler (its optimizers ask for it), what
`torch.export` stands on, and hocket: seconds, in each worker of each test. Here it is
done once; and what is measured in such workers is measured shortly (short.py).

Nothing here may start a thread: a forked process has only the one that forked.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import Final

import pytest
import torch
from torch import Tensor, nn

MODULES: Final = (
    "hocket.recipes.train",
    "hocket.run.launch",
    "safetensors.torch",
    "tests.run.pair",
    "tests.run.zoo",
    "torch._dynamo",
)


class _Any(nn.Module):
    """A model that is no Sequential, so that torch.export captures it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x)
        return found


def _prepare() -> None:
    for name in MODULES:
        import_module(name)
    from hocket.model.capture import capture
    from tests.run.short import measure_shortly

    capture(_Any(), (torch.ones(2, 2),))
    measure_shortly(pytest.MonkeyPatch())
    gc.freeze()  # what is there now is for nobody to look through again


_prepare()
