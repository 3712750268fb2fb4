"""A model, data, a loss and metrics of one's own, for the recipe beside this file.

hocket train examples/wine.toml
hocket train examples/wine.toml --set model.width=64 --workers 1
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_wine
from torch import Tensor, nn

Sample = tuple[Tensor, Tensor]  # what the model takes, what the loss takes


def make_model(width: int, num_layers: int) -> nn.Module:
    """Thirteen numbers of a wine in, scores of three growers out."""
    layers: list[nn.Module] = [nn.Linear(13, width)]
    for _ in range(num_layers):
        layers += [nn.ReLU(), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(width, 3))


def make_data(test_fraction: float) -> tuple[list[Sample], list[Sample]]:
    """Two of what has a length and gives `(inputs, targets)` for an index.

    Every worker calls this, and must get the same.
    """
    numbers, growers = load_wine(return_X_y=True)
    inputs = torch.tensor(numbers, dtype=torch.float32)
    inputs = (inputs - inputs.mean(0)) / inputs.std(0)
    samples = list(zip(inputs, torch.tensor(growers), strict=True))
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))
    shuffled = [samples[row] for row in order.tolist()]
    num_test = round(test_fraction * len(samples))
    return shuffled[num_test:], shuffled[:num_test]


def loss(score: Tensor, grower: Tensor) -> Tensor:
    """The mean over the samples of a microbatch."""
    return nn.functional.cross_entropy(score, grower)


def metrics(score: Tensor, grower: Tensor) -> dict[str, Tensor]:
    """Named means, the first of which is what the task is about."""
    return {"accuracy": (score.argmax(-1) == grower).float().mean()}
