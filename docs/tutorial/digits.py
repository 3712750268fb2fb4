"""What stays the same in every step of the tutorial: model, data and loss."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

NUM_EPOCHS = 4


def make_model() -> nn.Module:
    """A perceptron of six layers, the same on every worker."""
    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(nn.Linear(64, 256), *hidden, nn.Linear(256, 10))
    return model.double()  # so that rounding shows in no digit that is printed


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over the samples that it gets."""
    return cross_entropy(output, targets)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of 64 real handwritten digits, in the same order on every worker."""
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float64)
    y = torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(1)
    for _ in range(NUM_EPOCHS):
        order = torch.randperm(len(x), generator=generator)
        for rows in order.split(64)[:-1]:  # 28 batches; the last one is smaller
            yield x[rows], y[rows]
