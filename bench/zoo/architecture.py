"""An architecture of the zoo at the size in which it is measured, and where to find it.

The models are those of tests/zoo, made wide enough that a step takes a tenth of a
second or so, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

import torch
from torch import nn

from hocket.run.data.loss import LossFunction

Draw = Callable[[int, torch.Generator], tuple[Any, Any]]

# Each module has a table ARCHITECTURES; only the one asked for is imported, for
# transformers and torchvision take seconds.
FAMILIES: Final = {
    "bench.zoo.odd": ("perceptron", "frozen", "mixed-types", "nested", "branching"),
    "bench.zoo.text": (
        "bert",
        "distilbert",
        "gpt2",
        "t5",
        "vit",
        "lstm",
        "transformer",
        "tied",
    ),
    "bench.zoo.vision": (
        "resnet",
        "resnext",
        "densenet",
        "mobilenetv3",
        "unet",
        "retinanet",
    ),
}
NAMES: Final = tuple(name for names in FAMILIES.values() for name in names)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model with its batch.

    Args:
        make: the model.
        loss: as a pipeline takes it.
        draw: a batch of so many samples.
        batch_size: samples per step.
        num_microbatches: that a pipeline cuts them into.
        cut: where, if the model cannot be captured whole.
        ddp: arguments of DistributedDataParallel without which it does not train.
    """

    make: Callable[[], nn.Module]
    loss: LossFunction
    draw: Draw
    batch_size: int
    num_microbatches: int = 8
    cut: tuple[str, ...] | None = None
    ddp: Mapping[str, Any] = field(default_factory=dict)

    def batch(self) -> tuple[Any, Any]:
        """The same on every worker."""
        return self.draw(self.batch_size, torch.Generator().manual_seed(1))


def architecture(name: str) -> Architecture:
    """Of a name in `NAMES`."""
    family = next(module for module, names in FAMILIES.items() if name in names)
    found: Architecture = import_module(family).ARCHITECTURES[name]
    return found
