"""Small models of all kinds, their batches, and the eager loop they must equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket

NUM_STEPS: Final = 20
TOLERANCE: Final = 1e-10  # of float64
_NUM_TOKENS: Final = 20


@dataclass(frozen=True)
class Specimen:
    """A model in float64, and how to make a batch of it."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Any, Any]]


class Perceptron(nn.Module):
    """Linear layers, one of which is not trained and one without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(requires_grad=False)
        self.last = nn.Linear(16, 4, bias=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        """Go through all layers."""
        return self.last(torch.tanh(self.frozen(F.gelu(self.first(x)))))


def convolutional() -> nn.Module:
    """Convolutions with BatchNorm, dropout, and an activation in place."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Conv2d(8, 8, 3, groups=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.Hardswish(),
        nn.Flatten(),
        nn.Linear(8 * 36, 4),
    )


class Dense(nn.Module):
    """Each layer reads the outputs of all layers before it."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [3, 7, 11]
        self.layers = nn.ModuleList(nn.Conv2d(n, 4, 3, padding=1) for n in sizes)
        self.last = nn.Linear(15, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Concatenate, over and over."""
        for layer in self.layers:
            x = torch.cat((x, torch.relu(layer(x))), 1)
        return self.last(x.mean((2, 3)))


class Language(nn.Module):
    """An embedding tied to the last layer, around a layer of its own kind."""

    def __init__(self, inner: nn.Module, *, is_tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_NUM_TOKENS, 8)
        self.inner = inner
        self.last = nn.Linear(8, _NUM_TOKENS, bias=False)
        if is_tied:
            self.last.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the next token."""
        x = self.inner(self.embedding(tokens))
        return self.last(x[0] if isinstance(x, tuple) else x)


class Cells(nn.Module):
    """A loop over time in Python, with two layers in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GRUCell(8, 8), nn.LSTMCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Go through time."""
        a = b = c = x.new_zeros(x.shape[0], 8)
        outputs = []
        for step in x.unbind(1):
            a = self.first(step, a)
            b, c = self.second(a, (b, c))
            outputs.append(b)
        return torch.stack(outputs, 1)


def attention(*, dropout: float = 0.1) -> nn.Module:
    """A transformer's layer.

    Without biases: the gradient of the keys' bias is rounding alone, which AdamW makes
    as large as any other.
    """
    return nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True, bias=False)


def vectors() -> tuple[Tensor, Tensor]:
    """Eight numbers each, of four classes."""
    return torch.randn(6, 8, dtype=torch.float64), torch.randint(0, 4, (6,))


def images() -> tuple[Tensor, Tensor]:
    """Small images, of four classes."""
    return torch.randn(4, 3, 8, 8, dtype=torch.float64), torch.randint(0, 4, (4,))


def tokens() -> tuple[Tensor, Tensor]:
    """Tokens, and those that follow them."""
    return tuple(torch.randint(0, _NUM_TOKENS, (3, 5)) for _ in range(2))  # type: ignore[return-value]


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over classes, or over the tokens of all positions."""
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


SPECIMENS: Final = {
    "perceptron": Specimen(Perceptron, vectors),
    "convolutional": Specimen(convolutional, images),
    "dense": Specimen(Dense, images),
    "tied transformer": Specimen(lambda: Language(attention(), is_tied=True), tokens),
    "lstm": Specimen(lambda: Language(nn.LSTM(8, 8, 2, batch_first=True)), tokens),
    "cells": Specimen(lambda: Language(Cells()), tokens),
}

OPTIMIZERS: Final[dict[str, Callable[[Any], torch.optim.Optimizer]]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3),
}

# torch's other ones, each on one model.
MORE_OPTIMIZERS: Final[dict[str, Callable[[Any], torch.optim.Optimizer]]] = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, 1e-3, amsgrad=True, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, lr_decay=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, 1e-3),
    "SGD, maximizing": lambda p: torch.optim.SGD(p, 1e-4, maximize=True),
}


def batches_of(specimen: Specimen, num_steps: int = NUM_STEPS) -> list[Any]:
    """Batches drawn from one seed."""
    torch.manual_seed(0)
    return [specimen.batch() for _ in range(num_steps)]


def model_of(specimen: Specimen) -> nn.Module:
    """A model drawn from one seed."""
    torch.manual_seed(1)
    return specimen.make().double()


def train_eagerly(
    model: nn.Module,
    make: Callable[[Any], torch.optim.Optimizer],
    batches: Sequence[Any],
) -> tuple[list[float], nn.Module]:
    """Train a copy as torch does; return its losses and the copy."""
    model, losses = copy.deepcopy(model), []
    optimizer = make(model.parameters())
    torch.manual_seed(2)
    for inputs, targets in batches:
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, model


def train_compiled(step: hocket.CompiledStep, batches: Sequence[Any]) -> list[float]:
    """Train with a compiled step; return its losses."""
    torch.manual_seed(2)
    losses = [step(batch).loss for batch in batches]
    step.synchronize()
    return losses


def difference(model: nn.Module, other: nn.Module) -> float:
    """The largest difference of any weight or buffer, relative to its largest value.

    Where all values are below 1e-6, relative to that: a weight that begins at zero and
    whose gradient is rounding alone (the bias of attention's keys) stays there.
    """
    ours, theirs = model.state_dict(), other.state_dict()
    return max(
        float((ours[name] - x).abs().max() / x.abs().max().clamp(min=1e-6))
        for name, x in theirs.items()
        if x.is_floating_point()
    )
