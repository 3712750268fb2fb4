"""Bytes of optimizer state, against those that real optimizers keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hocket.model.profile.optimizer_bytes import optimizer_bytes

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
}


def really(model: nn.Module, make: Make) -> dict[str, int]:
    """What a real step leaves behind."""
    optimizer = make(list(model.parameters()))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return {
        name: sum(x.nbytes for x in optimizer.state[p].values() if _is_tensor(x))
        for name, p in model.named_parameters()
    }


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_state_is_what_a_real_step_leaves(name: str) -> None:
    """Parameter by parameter; the count of steps is a few bytes."""
    model = nn.Linear(64, 32)
    found = optimizer_bytes(
        dict(model.named_parameters()),
        lambda named: OPTIMIZERS[name](list(named.values())),
    )
    wanted = really(model, OPTIMIZERS[name])
    for key, num_bytes in wanted.items():
        assert found.get(key, 0) == pytest.approx(num_bytes, abs=16)


def test_no_memory_is_needed() -> None:
    """A weight of a terabyte, and its two averages."""
    weight = torch.empty(2**19, 2**19, device="meta")
    found = optimizer_bytes(
        {"weight": weight}, lambda named: torch.optim.AdamW(list(named.values()))
    )
    assert found["weight"] == pytest.approx(2 * weight.nbytes, rel=1e-6)


def test_nothing_trained_keeps_nothing() -> None:
    """A model without parameters has no optimizer either."""
    assert optimizer_bytes({}, lambda named: torch.optim.AdamW([])) == {}
