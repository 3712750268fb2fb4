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
    return nn.Sequential(nn.Linear(64, 256), *hidden, nn.Linear(256, 10))


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over the samples that it gets."""
    return cross_entropy(output, targets)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of 64 real handwritten digits, in the same order on every worker."""
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(1)
    for _ in range(NUM_EPOCHS):
        for rows in torch.randperm(len(x), generator=generator).split(64):
            yield x[rows], y[rows]
