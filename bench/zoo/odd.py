"""Networks with one peculiarity each, 512 wide."""

from __future__ import annotations

from typing import Any, Final

import torch

from bench.zoo.architecture import Architecture, Draw
from tests.run.support.small_models import classes, perceptron
from tests.zoo.odd import Branching, Frozen, MixedTypes, Nested, nested_loss

WIDTH: Final = 512
UNUSED: Final = {"find_unused_parameters": True}


def _labels(count: int, rng: torch.Generator) -> torch.Tensor:
    return torch.randint(3, (count,), generator=rng)


def _vectors(width: int) -> Draw:
    def draw(count: int, rng: torch.Generator) -> tuple[Any, Any]:
        return torch.randn(count, width, generator=rng), _labels(count, rng)

    return draw


def _tokens(count: int, rng: torch.Generator) -> tuple[Any, Any]:
    return torch.randint(11, (count, 5), generator=rng), _labels(count, rng)


def _nested(count: int, rng: torch.Generator) -> tuple[Any, Any]:
    x, early, late = torch.randn(3, count, WIDTH, generator=rng)
    names = ["first", "add", "plain", "add", "last"]
    inputs = {"x": x, "more": (early, {"late": late}), "factor": 0.5, "names": names}
    return inputs, _labels(count, rng)


def _gated(count: int, rng: torch.Generator) -> tuple[Any, Any]:
    x = torch.randn(count, WIDTH, generator=rng)
    return (x, torch.rand(count, generator=rng)), _labels(count, rng)


ARCHITECTURES: Final = {
    "perceptron": Architecture(
        lambda: perceptron(width=WIDTH), classes, _vectors(WIDTH), 256
    ),
    "frozen": Architecture(lambda: Frozen(WIDTH), classes, _vectors(6), 256),
    "mixed-types": Architecture(lambda: MixedTypes(WIDTH), classes, _tokens, 256),
    "nested": Architecture(
        lambda: Nested(WIDTH), nested_loss, _nested, 256, ddp=UNUSED
    ),
    "branching": Architecture(
        lambda: Branching(WIDTH), classes, _gated, 128, cut=("blocks.1",), ddp=UNUSED
    ),
}
