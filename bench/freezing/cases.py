"""What is trained, and the contestants, as settings of recipes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

NUM_WORKERS: Final = 2
NUM_EPOCHS: Final = 10
BASE: Final = "GPipe, nothing freezes"
UNFROZEN: Final = "1x2, nothing freezes"
ALL: Final = "all"
LOCAL: Final = Path(__file__).parents[3] / "shared" / "data"

_FREEZE: Final = ("freeze.policy=alpha", "freeze.alpha=0.2")
_KEEPS: Final = "freeze.shapes={}"
EVALUATED: Final = "data.max_samples=1000"  # beside the few that are trained on
# On disk, too: in another epoch, a sample may be the other replica's.
_CACHE: Final = ("cache.ram_bytes=1000000000", "cache.disk_bytes=1000000000")


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to train.

    Args:
        name: in tables.
        settings: of the recipe, beside those of the case.
        is_limited: whether it must fit the memory that keeps the unfrozen model off one
            device.
        is_cached: whether it needs the cache.
    """

    name: str
    settings: tuple[str, ...]
    is_limited: bool = False
    is_cached: bool = False

    @property
    def freezes(self) -> bool:
        """Whether layers freeze."""
        return _FREEZE[0] in self.settings


# With what the contestants measure before the first step, and no decision.
PRETRAINING: Final = (*_FREEZE, "freeze.every_steps=1000000")
CONTESTANTS: Final = (
    Contestant(BASE, ("freeze.policy=none",)),
    Contestant(
        UNFROZEN,  # the microbatches of the whole batch are as large
        (
            "freeze.policy=none",
            "pipeline.layout=1x2",
            "pipeline.num_microbatches=2",
        ),
    ),
    Contestant("freezing only", (*_FREEZE, "freeze.recut=false")),
    Contestant("+ re-cut", (*_FREEZE, _KEEPS)),
    Contestant("+ replicas", _FREEZE, is_limited=True),
    Contestant("+ cache", (*_FREEZE, _KEEPS, *_CACHE), is_cached=True),
    Contestant(ALL, (*_FREEZE, *_CACHE), is_limited=True, is_cached=True),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A model and its data.

    Args:
        name: in tables.
        recipe: the recipe's name.
        data: its folder, in `--data` or beside the repository.
        settings: what makes it small: ten epochs take two cores some seconds.
    """

    name: str
    recipe: str
    data: str
    settings: tuple[str, ...]


_SMALL: Final = (
    f"training.num_epochs={NUM_EPOCHS}",
    "training.num_loaders=0",
    "training.batch_size=32",
    "pipeline.layout=2x1",
    "pipeline.schedule=gpipe",
    "pipeline.num_microbatches=4",
    "optimizer.num_warmup_steps=4",
    "checkpoint.every_epochs=",
)

CASES: Final = {
    case.name: case
    for case in (
        Case(
            "ViT, CIFAR-10",
            "cifar10-vit",
            "cifar-10-batches-py",
            (
                *_SMALL,
                "model.width=96",
                "model.num_blocks=12",
                "model.mlp_width=384",
                "model.dropout=0.0",
                "data.max_samples=320",
                "model.patch_size=4",
                "data.shift_pixels=0",
                "data.flip=false",
                "training.ema_decay=",
                "optimizer.learning_rate=5e-4",
            ),
        ),
        Case(
            "BERT, SST-2",
            "sst2-bert",
            "sst2",
            (
                *_SMALL,
                "model.width=96",
                "model.num_blocks=12",
                "model.num_heads=4",
                "model.mlp_width=384",
                "data.max_samples=320",
                "data.num_tokens=64",
                "data.num_pieces=4000",
                "optimizer.learning_rate=5e-4",
            ),
        ),
    )
}
