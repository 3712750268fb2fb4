"""Layers whose weight gradients can wait, in all the ways that they can be made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer and the shape of its input.

    Args:
        make: it.
        shape: of its input, with the samples first.
        num_rows: of an embedding, whose input are numbers below that.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    num_rows: int = 0

    def inputs(self, *, wants_grad: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The same each time."""
        rng = torch.Generator().manual_seed(2)
        if self.num_rows:
            return (torch.randint(self.num_rows, self.shape, generator=rng),)
        x = torch.randn(self.shape, generator=rng, dtype=torch.float64)
        return (x.to(dtype).requires_grad_(wants_grad),)


class Strided(nn.Module):
    """A linear layer on an input that does not lie in memory in order."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x.transpose(1, 2))
        return found


class Changed(nn.Module):
    """Its output is changed in place by the next operator."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.layer(x)) * 2


class Product(nn.Module):
    """A linear layer as the product with a parameter, on tokens in any order."""

    def __init__(self, *, strided: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 7))
        self.strided = strided

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x.transpose(1, 2) if self.strided else x, self.weight)


class Transposed(nn.Module):
    """Its weight's rows are inputs, as in the GPT-2 of the transformers package."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 7))
        self.bias = nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, 5), self.weight)
        return y.view(*x.shape[:-1], 7)


class Both(nn.Module):
    """A bilinear layer of one input and its mirror image."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.layer = nn.Bilinear(5, 5, 4, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x, x.flip(-1))
        return found


def _conv(num_dims: int, *sizes: Any, **more: Any) -> Layer:
    kinds = nn.Conv1d, nn.Conv2d, nn.Conv3d
    kind, shape = kinds[num_dims - 1], (2, sizes[0], 9, 7, 5)[: 2 + num_dims]
    return Layer(lambda: kind(*sizes, **more), shape)


def _transposed(num_dims: int, *sizes: Any, **more: Any) -> Layer:
    kinds = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
    kind, shape = kinds[num_dims - 1], (2, sizes[0], 5, 4, 3)[: 2 + num_dims]
    return Layer(lambda: kind(*sizes, **more), shape)


LAYERS: Final[dict[str, Layer]] = {
    "linear": Layer(lambda: nn.Linear(5, 7), (6, 5)),
    "linear, no bias": Layer(lambda: nn.Linear(5, 7, bias=False), (6, 5)),
    "linear, tokens": Layer(lambda: nn.Linear(5, 7), (3, 4, 5)),
    "linear, tokens, no bias": Layer(lambda: nn.Linear(5, 7, bias=False), (3, 2, 4, 5)),
    "linear, strided": Layer(lambda: Strided(bias=True), (3, 5, 4)),
    "linear, strided, no bias": Layer(lambda: Strided(bias=False), (3, 5, 4)),
    "linear, changed": Layer(lambda: Changed(nn.Linear(5, 7)), (3, 4, 5)),
    "linear, no bias, changed": Layer(
        lambda: Changed(nn.Linear(5, 7, bias=False)), (3, 4, 5)
    ),
    "product": Layer(lambda: Product(strided=False), (3, 4, 5)),
    "product, strided": Layer(lambda: Product(strided=True), (3, 5, 4)),
    "addmm": Layer(Transposed, (3, 4, 5)),
    "conv1d": _conv(1, 4, 6, 3),
    "conv1d, stride, dilation": _conv(1, 4, 6, 3, stride=2, dilation=2, bias=False),
    "conv1d, same": _conv(1, 4, 6, 4, padding="same"),
    "conv1d, groups": _conv(1, 4, 6, 3, groups=2),
    "conv1d, depthwise": _conv(1, 4, 4, 3, groups=4, padding=1),
    "conv2d": _conv(2, 4, 6, 3, padding=1),
    "conv2d, no bias": _conv(2, 4, 6, 3, padding=1, bias=False),
    "conv2d, stride": _conv(2, 4, 6, 3, stride=(2, 1), padding=(1, 0)),
    "conv2d, dilation": _conv(2, 4, 6, 3, dilation=2),
    "conv2d, groups": _conv(2, 4, 6, 3, groups=2),
    "conv2d, depthwise": _conv(2, 4, 8, 3, groups=4, padding=1),
    "conv2d, valid": _conv(2, 4, 6, 3, padding="valid"),
    "conv2d, same": _conv(2, 4, 6, 3, padding="same"),
    "conv2d, same, even": _conv(2, 4, 6, (2, 4), padding="same"),
    "conv2d, circular": _conv(2, 4, 6, 3, padding=1, padding_mode="circular"),
    "conv2d, reflect": _conv(2, 4, 6, 3, padding=1, padding_mode="reflect"),
    "conv2d, replicate": _conv(2, 4, 6, 3, padding=1, padding_mode="replicate"),
    "conv2d, changed": Layer(lambda: Changed(nn.Conv2d(4, 6, 3)), (2, 4, 9, 7)),
    "conv3d": _conv(3, 4, 6, 3),
    "conv3d, groups": _conv(3, 4, 6, 2, groups=2, stride=2, bias=False),
    "conv3d, depthwise": _conv(3, 4, 8, 3, groups=4, padding=1),
    "transposed 1d": _transposed(1, 4, 6, 3),
    "transposed 1d, depthwise": _transposed(1, 4, 4, 3, groups=4, stride=2),
    "transposed 2d": _transposed(2, 4, 6, 3, stride=2, padding=1, output_padding=1),
    "transposed 2d, groups": _transposed(2, 4, 6, 3, groups=2, bias=False),
    "transposed 2d, dilation": _transposed(2, 4, 6, 3, dilation=2),
    "transposed 2d, depthwise": _transposed(2, 4, 8, 3, groups=4, padding=1),
    "transposed 3d": _transposed(3, 4, 6, 2, stride=2),
    "transposed 3d, groups": _transposed(3, 4, 6, 2, groups=2, dilation=2),
    "embedding": Layer(lambda: nn.Embedding(9, 5), (3, 4), 9),
    "embedding, padding": Layer(lambda: nn.Embedding(9, 5, padding_idx=-2), (3, 4), 9),
    "embedding, by frequency": Layer(
        lambda: nn.Embedding(9, 5, scale_grad_by_freq=True), (3, 4), 9
    ),
    "embedding, sparse": Layer(lambda: nn.Embedding(9, 5, sparse=True), (3, 4), 9),
    "bilinear": Layer(lambda: Both(bias=True), (3, 4, 5)),
    "bilinear, no bias": Layer(lambda: Both(bias=False), (6, 5)),
}

# What these do to their weight, no route is for: it gets its gradient with I.
AT_ONCE: Final[dict[str, Layer]] = {
    "embedding, renormed": Layer(lambda: nn.Embedding(9, 5, max_norm=0.5), (3, 4), 9),
    "bag, sum": Layer(lambda: nn.EmbeddingBag(9, 5, mode="sum"), (3, 4), 9),
    "bag, mean": Layer(lambda: nn.EmbeddingBag(9, 5, padding_idx=2), (3, 4), 9),
    "bag, sparse": Layer(lambda: nn.EmbeddingBag(9, 5, sparse=True), (3, 4), 9),
}
