"""Models with everything that makes pipelines go wrong, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """A residual around two linear layers, with dropout."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """From x_BW to x_BW."""
        return x + self.dropout(self.down(torch.tanh(self.up(x))))


def perceptron(
    dropout: float = 0.0, width: int = 6, num_residuals: int = 6
) -> nn.Module:
    """A chain of residuals, as an nn.Sequential."""
    layers = [Residual(width, dropout) for _ in range(num_residuals)]
    return nn.Sequential(*layers, nn.Linear(width, 3))


def timed(width: int = 4) -> nn.Module:
    """Linear layers with bias over (samples, time, features).

    Their outputs are views, which torch's own split of a backward cannot detach where a
    stage ends in one.
    """
    layers = [(nn.Tanh(), nn.Linear(width, width)) for _ in range(4)]
    return nn.Sequential(*(layer for pair in layers for layer in pair))


class SmallResNet(nn.Module):
    """Convolutions with BatchNorm, whose statistics depend on the microbatches.

    The gradient of a bias in front of a BatchNorm is nothing but rounding, which AdamW
    blows up: with them, only what computes bit for bit alike ends alike.
    """

    def __init__(self, width: int = 4, *, bias: bool = True) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=bias),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            )
            for _ in range(5)
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        """From images to logits."""
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    """Self-attention and a perceptron, each around a residual.

    The keys have no bias: its gradient is nothing but rounding, which AdamW would
    blow up to whole steps in any direction.
    """

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.perceptron = Residual(width, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """From x_BTW and the padding of its tokens to x_BTW."""
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=~mask[:, None, None]
        )
        return self.perceptron(x + self.dropout(self.out(attended.squeeze(1))))


class TiedTransformer(nn.Module):
    """Token embedding tied to the head, a skip from first to last layer, a mask.

    It takes several inputs, one of them not a tensor, and has a parameter that never
    gets a gradient and a buffer.
    """

    def __init__(
        self, dropout: float = 0.0, width: int = 8, num_words: int = 11
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_words, width)
        self.layers = nn.ModuleList(Attention(width, dropout) for _ in range(4))
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.tensor(0.5))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_words, bias=False)
        self.head.weight = self.embed.weight

    def forward(
        self, tokens: Tensor, mask: Tensor, flavour: str = "plain"
    ) -> dict[str, Tensor]:
        """From tokens_BT and the mask of padding to logits_BTV."""
        first = x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = layer(x, mask)
        if flavour == "plain":
            x = x + first
        return {"logits": self.head(self.norm(x)), "hidden": x}


def classes(output: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over samples."""
    return F.cross_entropy(output, targets)


def tokens(output: dict[str, Tensor], targets: Tensor) -> dict[str, Tensor]:
    """Two named scalars, whose sum is trained."""
    logits = output["logits"]
    return {
        "token": F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
        "size": 1e-3 * output["hidden"].square().mean(),
    }


@dataclass(frozen=True, slots=True)
class Specimen:
    """A model, its loss, and how to draw a batch.

    Args:
        make: the model.
        loss: as a pipeline takes it.
        draw: a batch of so many samples.
        is_double: turned into float64; else it has types of its own.
        is_random: it draws random numbers in training.
        cuts: by number of stages, where to cut, if that is not left to a profile.
    """

    make: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Any]
    draw: Callable[[int, torch.Generator], tuple[Any, Any]]
    is_double: bool = True
    is_random: bool = False
    cuts: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


def _vectors(count: int, rng: torch.Generator) -> tuple[Any, Any]:
    x = torch.randn(count, 6, generator=rng, dtype=torch.float64)
    return x, torch.randint(3, (count,), generator=rng)


def _times(count: int, rng: torch.Generator) -> tuple[Any, Any]:
    x = torch.randn(count, 3, 4, generator=rng, dtype=torch.float64)
    return x, torch.randn(count, 3, 4, generator=rng, dtype=torch.float64)


def _images(count: int, rng: torch.Generator) -> tuple[Any, Any]:
    x = torch.randn(count, 2, 5, 5, generator=rng, dtype=torch.float64)
    return x, torch.randint(3, (count,), generator=rng)


def _sentences(count: int, rng: torch.Generator) -> tuple[Any, Any]:
    words = torch.randint(11, (count, 7), generator=rng)
    mask = torch.zeros(count, 7, dtype=torch.bool)
    mask[:, -1] = torch.rand(count, generator=rng) < 0.5
    inputs = {"tokens": words, "mask": mask, "flavour": "plain"}
    return inputs, torch.randint(11, (count, 7), generator=rng)


ZOO = {
    "perceptron": Specimen(perceptron, classes, _vectors),
    "dropout": Specimen(lambda: perceptron(0.3), classes, _vectors, is_random=True),
    "deep": Specimen(lambda: perceptron(num_residuals=16), classes, _vectors),
    "deep-dropout": Specimen(
        lambda: perceptron(0.3, num_residuals=16), classes, _vectors, is_random=True
    ),
    "resnet": Specimen(SmallResNet, classes, _images),
    "normed": Specimen(lambda: SmallResNet(bias=False), classes, _images),
    "timed": Specimen(timed, F.mse_loss, _times),
    "tied": Specimen(TiedTransformer, tokens, _sentences),
    "tied-dropout": Specimen(
        lambda: TiedTransformer(0.2), tokens, _sentences, is_random=True
    ),
}


def specimen_of(name: str) -> Specimen:
    """From here, or from tests/zoo, which takes long to import."""
    if name in ZOO:
        return ZOO[name]
    from tests.zoo.specimens import SPECIMENS

    return SPECIMENS[name]


def make_model(name: str) -> nn.Module:
    """The specimen's model, the same each time."""
    torch.manual_seed(7)
    specimen = specimen_of(name)
    model = specimen.make()
    return model.double() if specimen.is_double else model


def batches(name: str, num_steps: int, batch_size: int, last: int) -> list[Any]:
    """The specimen's batches, the last one smaller."""
    rng = torch.Generator().manual_seed(3)
    sizes = [batch_size] * (num_steps - 1) + [last]
    return [specimen_of(name).draw(size, rng) for size in sizes]
