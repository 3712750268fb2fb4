"""What is trained: hocket's own recipes, made small enough for one core.

Each is cut into two stages. Where a flush-free pipeline would put more cuts makes no
difference: how old the weights are is a matter of the stage alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.staleness.muon import MuonAndAdamw
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.resolve import resolve
from hocket.recipes.config.sections import AdamwSettings
from hocket.recipes.training.optimizer import make_optimizer
from hocket.run.weights.settings import OptimizerFactory

# Of all: the same number of microbatches, and one process alone.
_ALWAYS: Final = ("pipeline.num_microbatches=2", "training.num_loaders=0")


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to learn.

    Args:
        name: in tables.
        recipe: of hocket, by name.
        settings: that make it small, as `--set` takes them; `pipeline.cut` says where
            the second stage begins.
        metric: the recipe's metric of how well it was learned.
        data: the recipe's `data.path` in the folder of all data; empty where it has
            none.
        has_muon: whether Muon trains the matrices of the blocks.
    """

    name: str
    recipe: str
    settings: tuple[str, ...]
    metric: str
    data: str = ""
    has_muon: bool = False

    def resolved(self, seed: int, folder: Path) -> Recipe:
        """The whole recipe.

        Args:
            seed: of the weights, the order of the data, shifts and dropout.
            folder: with the data of all cases.
        """
        settings = [*_ALWAYS, *self.settings, f"training.seed={seed}"]
        if self.data:
            settings.append(f"data.path={folder / self.data}")
        return resolve(self.recipe, settings).recipe

    def optimizer(self, recipe: Recipe) -> OptimizerFactory:
        """What updates each half."""
        if not self.has_muon:
            return make_optimizer(recipe.optimizer)
        assert isinstance(recipe.optimizer, AdamwSettings), "its rate is Muon's, too"
        return _muon(recipe.optimizer)


def _muon(settings: AdamwSettings) -> Callable[..., MuonAndAdamw]:
    return lambda parameters: MuonAndAdamw(
        parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay
    )


_DIGITS: Final = (
    "model.width=48",
    "model.num_blocks=4",
    "model.mlp_width=96",
    'pipeline.cut=["blocks.2"]',
    "training.num_epochs=10",
)
_SGD: Final = (
    "optimizer.kind=sgd",
    "optimizer.learning_rate=0.1",
    "optimizer.momentum=0.9",
    "optimizer.weight_decay=1e-4",
)
_CIFAR: Final = (
    "model.width=8",
    "model.num_blocks=1",
    'pipeline.cut=["blocks.1"]',
    "training.num_epochs=5",
    "training.batch_size=64",
    "optimizer.num_warmup_steps=20",
)
_SHAKESPEARE: Final = (
    "model.width=64",
    "model.num_heads=4",
    "model.mlp_width=256",
    'pipeline.cut=["blocks.2"]',
    "training.max_steps=250",
    "optimizer.num_warmup_steps=25",
)
_SST2: Final = (
    "data.task=sst2",
    "data.num_tokens=32",
    "data.num_pieces=8000",
    "model.width=64",
    "model.num_blocks=2",
    "model.num_heads=4",
    "model.mlp_width=128",
    'pipeline.cut=["bert.encoder.layer.1"]',
    "training.num_epochs=2",
    "training.clip_norm=",  # per group of delays it would be another training
    "optimizer.learning_rate=1e-3",
    "optimizer.num_warmup_steps=20",
)

CASES: Final = {
    case.name: case
    for case in (
        Case("digits", "digits-vit", _DIGITS, "accuracy"),
        Case(
            "digits, longer",
            "digits-vit",
            (*_DIGITS, "training.num_epochs=40"),
            "accuracy",
        ),
        Case(
            "digits, SGD",
            "digits-vit",
            (*_DIGITS, *_SGD),
            "accuracy",
        ),
        Case("CIFAR-10", "cifar10-resnet", _CIFAR, "accuracy", "cifar-10-batches-py"),
        Case("SST-2", "mrpc-bert", _SST2, "accuracy", "sst2"),
        Case(
            "Shakespeare, AdamW",
            "text-gpt",
            _SHAKESPEARE,
            "bits_per_byte",
            "text/tinyshakespeare.txt",
        ),
        Case(
            "Shakespeare, AdamW, fast",
            "text-gpt",
            (*_SHAKESPEARE, "optimizer.learning_rate=1e-2"),
            "bits_per_byte",
            "text/tinyshakespeare.txt",
        ),
        Case(
            "Shakespeare, Muon",
            "text-gpt",
            _SHAKESPEARE,
            "bits_per_byte",
            "text/tinyshakespeare.txt",
            has_muon=True,
        ),
    )
}
