"""Optimizers of all kinds, for stages and for whole models alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hocket.run.weights.settings import Parameters


class Lars(torch.optim.Optimizer):
    """Momentum whose rate each parameter's own norms decide (arXiv:1708.03888)."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move each parameter by a share of its own size."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                trust = (p.norm() + 1e-3) / (p.grad.norm() + 1e-3)
                state = self.state[p]
                moved = state.setdefault("momentum", torch.zeros_like(p))
                moved.mul_(0.9).add_(p.grad * trust)
                p.sub_(group["lr"] * moved)


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum for matrices, plain momentum for everything else."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "orthogonal": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Keep a momentum per parameter, and step along it or what it spans."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                moved = state.setdefault("momentum", torch.zeros_like(p))
                moved.mul_(0.9).add_(p.grad)
                step = _orthogonalized(moved) if group["orthogonal"] else moved
                p.sub_(group["lr"] * step)


def _orthogonalized(matrix: Tensor) -> Tensor:
    """Push the singular values towards one (Newton and Schulz, three rounds)."""
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x


def grouped(parameters: Parameters) -> torch.optim.Optimizer:
    """No decay of vectors, and a rate for the first layers that differs."""
    groups = [
        {
            "params": [p],
            "lr": 1e-3 if name.startswith(("0.", "embed")) else 3e-3,
            "weight_decay": 0.1 if p.ndim > 1 else 0.0,
        }
        for name, p in parameters.named()
    ]
    return torch.optim.AdamW(groups)


def muon(parameters: Parameters) -> torch.optim.Optimizer:
    """Matrices apart from the rest; a stage may have none of either."""
    groups = [
        {"params": [p for p in parameters if p.ndim == 2], "orthogonal": True},
        {"params": [p for p in parameters if p.ndim != 2]},
    ]
    return Muon(groups, lr=3e-3)


def recorded(parameters: Parameters) -> torch.optim.Optimizer:
    """Gradient descent that remembers the raw gradients of each step."""
    optimizer = torch.optim.SGD(parameters, lr=0.05)

    def remember(*_: Any) -> None:
        GRADIENTS.append(
            {
                name: p.grad.clone()
                for name, p in parameters.named()
                if p.grad is not None
            }
        )

    optimizer.register_step_pre_hook(remember)
    return optimizer


GRADIENTS: list[dict[str, Tensor]] = []  # of `recorded`: one entry per step and stage

OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1),
    "named": lambda p: torch.optim.AdamW(p.named(), lr=3e-3),
    "sgd": recorded,
    "nesterov": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, nesterov=True, foreach=True
    ),
    "groups": grouped,
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "lars": lambda p: Lars(p, lr=1e-3),
    "muon": muon,
}


def make_scheduler(
    optimizer: torch.optim.Optimizer,
) -> torch.optim.lr_scheduler.LambdaLR:
    """A rate that changes with every update."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 5))
