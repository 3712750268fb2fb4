"""What the workers of the memory test do: train, and look at what they hold."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from bench.memory.run import measure
from bench.models import Block, Case, Head, Residual, Stem
from tests.run.support.joined import join


def _transformer() -> nn.Sequential:
    return nn.Sequential(*(Block(64) for _ in range(4)))


def _resnet() -> nn.Sequential:
    blocks = (Residual(*sizes) for sizes in ((8, 8, 1), (8, 16, 2), (16, 16, 1)))
    return nn.Sequential(Stem(8), *blocks, Head(16, 10))


MODELS: Final = {
    case.name: case
    for case in (
        Case("transformer", _transformer, (32, 64), 4, 2),
        Case("resnet", _resnet, (3, 32, 32), 4, 4, classes=10),
    )
}


def measure_all(runs: list[list[str]], folder: str) -> list[dict[str, Any]]:
    """Rows of all runs: model, schedule and which stages recompute."""
    world = join()
    return [
        row
        for name, schedule, recompute in runs
        for row in measure(world, MODELS[name], schedule, recompute, folder)
    ]
