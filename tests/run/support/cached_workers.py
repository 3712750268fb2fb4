"""Workers that keep what frozen layers compute, and what they train without it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.freeze.cache import payoff
from hocket.run.data.samples import EpochRandom
from tests.run.support.freezing_workers import ADAMW, OneMore, measure_briefly
from tests.run.support.joined import join
from tests.run.support.started import started

NUM_EPOCHS: Final = 6
STEPS_PER_EPOCH: Final = 2
BATCH_SIZE: Final = 16
WIDTH: Final = 32  # at this, kernels compute each row alike, wherever it is
ROOM: Final = 1 << 20


@dataclass
class Rows:
    """Thirty-two samples; `noise` is added to them, drawn for each epoch."""

    noise: float = 0.0
    width: int = 8
    num_samples: int = 32
    fingerprint: int = 7
    _inputs: Tensor = field(init=False)
    _targets: Tensor = field(init=False)

    def __post_init__(self) -> None:
        rng = torch.Generator().manual_seed(1)
        self._inputs = torch.randn(32, self.width, generator=rng, dtype=torch.float64)
        self._targets = torch.randint(3, (32,), generator=rng)

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """Their inputs: (B, width)."""
        drawn = 0.0 if draw is None else draw.uniform(rows, self.width)
        return self._inputs[rows] + self.noise * drawn

    def targets(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """Their targets: (B,)."""
        return self._targets[rows]


def always_pays() -> None:
    """Let reading pay however slow it is, so that tests know what is read."""
    payoff._MOST = float("inf")  # type: ignore[misc]


def make_chain() -> nn.Sequential:
    """Five layers that may freeze, and a head; the same each time."""
    torch.manual_seed(3)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
    return nn.Sequential(nn.Linear(8, WIDTH), *blocks, nn.Linear(WIDTH, 3)).double()


def train(
    cache: hocket.Cache | None,
    loader: hocket.SampleLoader | None = None,
    *,
    num_epochs: int = NUM_EPOCHS,
    model: nn.Module | None = None,
    **options: Any,
) -> tuple[list[Any], dict[str, Tensor]]:
    """Train some epochs of two steps, in four microbatches of four samples.

    A layer freezes before the third epoch, one more before the fifth, and so on.

    Returns:
        Of each step: frozen layers, layout, loss and hits; and the weights.
    """
    if loader is None:
        loader = hocket.SampleLoader(Rows(), BATCH_SIZE, seed=2)
    found: list[Any] = []
    with started(
        make_chain() if model is None else model,
        F.cross_entropy,
        ADAMW,
        loader.example(),
        cache=cache,
        **{
            "freeze": OneMore(every_steps=2 * STEPS_PER_EPOCH),
            "shapes": {},
            "num_microbatches": 4,
            **options,
        },
    ) as pipeline:
        for _ in range(num_epochs):
            found += [
                [x.num_frozen, x.layout, x.loss, x.cache_hits]
                for x in pipeline.train(loader)
            ]
        return found, pipeline.state_dict()


def make_cached(
    folder: str | Path, model: nn.Module | None = None, **options: Any
) -> hocket.Pipeline:
    """A pipeline that freezes a layer every four steps, and keeps outputs on disk."""
    return started(
        make_chain() if model is None else model,
        F.cross_entropy,
        ADAMW,
        hocket.SampleLoader(Rows(), BATCH_SIZE).example(),
        num_microbatches=4,
        freeze=OneMore(every_steps=2 * STEPS_PER_EPOCH),
        cache=hocket.Cache(folder, ram_bytes=0, disk_bytes=ROOM),
        **{"shapes": {}, **options},
    )


def train_cached(folders: list[list[str]]) -> Any:
    """Train on four workers, 4x1 to 2x2 to 1x4.

    Args:
        folders: for each run, those of all ranks.

    Returns:
        Of each run: what each step came to, and the weights.
    """
    measure_briefly()
    always_pays()
    world = join()
    answers = []
    for by_rank in folders:
        folder = by_rank[world.rank]
        cache = hocket.Cache(folder, ram_bytes=ROOM, disk_bytes=ROOM)
        found, state = train(cache, shapes={1: (2, 2), 2: (1, 4)}, world=world)
        answers.append([found, {name: x.tolist() for name, x in state.items()}])
    return answers
