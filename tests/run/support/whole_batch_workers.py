"""Pipelines with a loss over the whole batch, on any number of workers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

import hocket
from hocket.run.cluster.world import join_world
from hocket.run.data.loss import named_losses
from hocket.run.data.sample_loader import EvaluationLoader
from tests.run.support import plainly
from tests.run.support.concatenated_batches import ConcatenatedBatches
from tests.run.support.started import started

NUM_STEPS: Final = 4
NUM_SAMPLES: Final = 12
SGD: Final = partial(torch.optim.SGD, lr=0.05)


def make_model() -> nn.Module:
    """Six layers, with a nonlinearity between them."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8),
        *(layer for _ in range(4) for layer in (nn.Tanh(), nn.Linear(8, 8))),
        nn.Linear(8, 4),
    ).double()


def data() -> list[tuple[Tensor, Tensor]]:
    """The batches of all steps; the last one is smaller."""
    sizes = [NUM_SAMPLES] * (NUM_STEPS - 1) + [NUM_SAMPLES - 2]
    return plainly.classified(sizes, 6, 3, seed=1)


def barlow(output: Tensor, targets: Tensor) -> Tensor:
    """The correlation of two halves of the features over the batch."""
    a, b = (
        (x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-3) for x in output.chunk(2, 1)
    )
    return (a.T @ b / len(a) - torch.eye(2)).square().sum()


def batch_hard(output: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Each sample's furthest of its class, and nearest of another."""
    far = torch.cdist(output, output)
    alike = targets[:, None] == targets
    gap = (far * alike).amax(1) - far.masked_fill(alike, 1e9).amin(1)
    return {"loss": (gap + 1).relu().mean(), "furthest": far.max()}


def pipeline(loss: Any, **settings: Any) -> hocket.Pipeline:
    """Two stages on each device, or what the settings say."""
    return started(
        make_model(),
        loss,
        SGD,
        data()[0],
        **{
            "schedule": "looped-bfs",
            "stages_per_device": 2,
            "num_microbatches": 3,
            **settings,
        },
    )


LOSSES: Final[dict[str, Callable[..., Any]]] = {
    "barlow": barlow,
    "batch-hard": batch_hard,
}


def train(
    name: str, settings: dict[str, Any], reads: str = "batches"
) -> dict[str, Any]:
    """Train all steps; return losses, an evaluation, and a sum of each weight.

    Args:
        name: of the loss.
        settings: of the pipeline.
        reads: what each worker reads: whole "batches", or the "parts" that it needs.
    """
    torch.set_num_threads(1)
    loss = hocket.WholeBatch(LOSSES[name])
    with pipeline(loss, world=join_world(), **settings) as trained:
        batches = (
            EvaluationLoader(ConcatenatedBatches(data()), NUM_SAMPLES)
            if reads == "parts"
            else data()
        )
        losses = [result.loss for result in trained.train(batches)]
        weights = sums_of(trained.state_dict())
        evaluated = trained.evaluate(batches).loss
        return {"losses": losses, "weights": weights, "evaluated": evaluated}


def train_plainly(name: str) -> dict[str, Any]:
    """The same without a pipeline."""
    model = make_model()
    losses = plainly.train_plainly(model, LOSSES[name], SGD, data())
    evaluated = 0.0
    for inputs, targets in data():
        with torch.no_grad():
            value = named_losses(LOSSES[name](model(inputs), targets))["loss"].item()
        evaluated += value * len(targets) / ConcatenatedBatches(data()).num_samples
    weights = sums_of(model.state_dict())
    return {"losses": losses, "weights": weights, "evaluated": evaluated}


def sums_of(state: dict[str, Tensor]) -> dict[str, float]:
    """A number for each tensor, in which no two elements count alike."""
    return {
        name: float(x.flatten() @ torch.arange(1.0, x.numel() + 1, dtype=x.dtype))
        for name, x in state.items()
    }
