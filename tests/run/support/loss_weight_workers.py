"""Trains a net whose loss has weights and buffers of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import hocket
from hocket.errors import MetricsError
from tests.conformance.script import batches, chain, mse

NUM_STEPS = 4


class Centred(nn.Module):
    """A layer of its own, and a running centre."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.project = nn.Linear(3, 3).double()
        self.register_buffer("centre", torch.zeros(3, dtype=torch.float64))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss; move the centre, assigning the buffer anew."""
        found = self.project(output)
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * targets.mean(0)
        return (found - targets).square().mean() + self.project.weight.square().sum()


class Apart(Centred):
    """Compares samples with each other: a loss over the whole batch."""

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss."""
        found = self.project(output)
        return (found.T @ found / len(found) - torch.eye(3)).square().sum()


LOSSES: dict[str, Any] = {
    "centred": Centred,
    "whole": lambda: hocket.WholeBatch(Apart()),
}


def adam(parameters: Any) -> torch.optim.Optimizer:
    """It has a state of its own for each weight."""
    return torch.optim.AdamW(parameters, 0.01)


def pipeline(kind: str, options: dict[str, Any]) -> hocket.Pipeline:
    """A pipeline of a net of five layers, in float64."""
    settings = {"num_microbatches": 2, "schedule": "1f1b", **options}
    net, loss = chain().double(), LOSSES[kind]()
    return hocket.Pipeline(net, loss, optimizer=adam, example=batches()[0], **settings)


def state_of(run: hocket.Pipeline, *, ema: bool = False) -> dict[str, Any]:
    """Its weights and buffers."""
    return {name: x.tolist() for name, x in run.state_dict(ema=ema).items()}


def train(kind: str, options: dict[str, Any], folder: str = "") -> dict[str, Any]:
    """Train four steps; save after two of them."""
    with pipeline(kind, options) as run:
        for number, batch in enumerate(batches()):
            if folder and number == NUM_STEPS // 2:
                run.save(folder)
            run.step(batch)
        averages = {}
        if "ema_decay" in options:
            averages = {f"ema {n}": x for n, x in state_of(run, ema=True).items()}
        return {**state_of(run), **averages}


def resume(kind: str, options: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train the rest, from a checkpoint."""
    with pipeline(kind, options) as run:
        run.load(folder)
        for batch in batches()[NUM_STEPS // 2 :]:
            run.step(batch)
        return state_of(run)


def train_all(cases: list[Any]) -> list[dict[str, Any]]:
    """Train several cases on the same workers."""
    return [train(*given) for given in cases]


def refused_metrics() -> str:
    """Evaluate with a metric that reads all weights; then train."""
    net = chain().double()

    def metrics(output: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"size": torch.stack([p.norm() for p in net.parameters()]).sum()}

    with hocket.Pipeline(
        net, mse, optimizer=adam, example=batches()[0], num_microbatches=2
    ) as run:
        try:
            run.evaluate(batches()[:1], metrics)
        except MetricsError as error:
            run.step(batches()[0])
            return str(error)
    return ""
