"""Layers that freeze on accelerators: first that it is exact, then how fast.

Two workers, which share one GPU (gloo, and messages staged through pinned memory) or
have one each (NCCL), keep their two stages or become two replicas. One worker alone is
timed with nothing frozen, with half of the layers, and with what they compute kept.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from bench.gpu.checked import (
    TOLERANCE,
    Checks,
    Row,
    Setting,
    exactly,
    on_two_workers,
    relative_error,
    seconds_of,
)
from bench.measure import spread
from bench.models import Block, transformer
from hocket.freeze import Listed
from hocket.recipes.models.make import Blocks, VisionTransformer
from hocket.run.cluster.world import World, join_world, single_process_world
from hocket.run.data.batch import split_batch

NUM_PARTS: Final = 4
FREEZES: Final = Listed({1: 3, 2: 5}, every_steps=3)  # of seven layers before the head
FROZEN_FROM: Final = {3: 3, 6: 5}  # layers by step, as a loop freezes them
SHAPES: Final = ("ViT-B", "BERT-base")
NUM_BATCHES: Final = 4  # in an epoch
BATCH_SIZE: Final = 32
NUM_WORDS: Final = 30522
NUM_EPOCHS: Final = 8
_CONTESTANTS: Final = ("none", "half", "half and cache")
NUM_CHECKED_STEPS: Final = 9
LAYOUTS: Final[dict[str, dict[int, tuple[int, int]]]] = {
    "first shape": {},
    "replicas": {3: (1, 2)},
}


def elastic(setting: Setting) -> Row:
    """Layers freeze on two workers, and the layout changes."""
    return on_two_workers("bench.gpu.freezing:worker")


def worker(backend: str) -> list[Row]:
    """What each of two workers does."""
    exactly()
    world = join_world(backend=backend)
    return [check(name, world) for name in LAYOUTS]


def check(name: str, world: World) -> Row:
    """Weights in float64 beside those of a plain loop on the same device."""
    model = net(8, torch.float64)
    loop = copy.deepcopy(model).to(world.device)
    rng = torch.Generator().manual_seed(2)
    batches = [
        (
            torch.randn(10, 4, 8, generator=rng, dtype=torch.float64),
            torch.zeros(10, 4, 8, dtype=torch.float64),
        )
        for _ in range(NUM_CHECKED_STEPS)
    ]
    train_plainly(loop, batches)
    with make_pipeline(model, batches[0], FREEZES, LAYOUTS[name], world) as pipeline:
        results = [*pipeline.train(batches)]
        found = pipeline.state_dict()
    expected = loop.state_dict()
    worst = max(relative_error(found[key], value) for key, value in expected.items())
    return {
        "shapes": name,
        "layouts": [result.layout for result in results],
        "num_frozen": [result.num_frozen for result in results],
        "worst_error": worst,
        "holds": worst <= TOLERANCE,
    }


def train_plainly(model: nn.Sequential, batches: list[Any]) -> None:
    """Train one microbatch after the other; layers freeze at the same steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, batch in enumerate(batches):
        for layer in list(model)[: FROZEN_FROM.get(step, 0)]:
            layer.requires_grad_(requires_grad=False).eval()
        for part in split_batch(batch, NUM_PARTS):
            x = part.leaves[0].to(next(model.parameters()).device)
            loss = model(x).square().mean() * part.num_samples / len(batch[0])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def make_pipeline(
    model: nn.Module,
    batch: Any,
    policy: Listed | None,
    shapes: dict[int, tuple[int, int]] | None,
    world: World,
) -> hocket.Pipeline:
    """A pipeline of two stages, at first."""
    return hocket.Pipeline(
        model,
        F.mse_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        example=batch,
        schedule="1f1b",
        num_microbatches=NUM_PARTS,
        freeze=policy,
        shapes=shapes,
        world=world,
    )


def net(width: int, dtype: torch.dtype) -> nn.Sequential:
    """The same weights each time."""
    torch.manual_seed(1)
    return transformer(width).to(dtype)


class Rows:
    """Samples that do not vary, and classes.

    Args:
        inputs: of all samples.
    """

    fingerprint = 7

    def __init__(self, inputs: Tensor) -> None:
        self.num_samples = len(inputs)
        self._inputs, self._targets = inputs, torch.arange(len(inputs)) % 10

    def inputs(self, rows: Tensor, draw: Any) -> Tensor:
        """Their inputs."""
        return self._inputs[rows]

    def targets(self, rows: Tensor, draw: Any) -> Tensor:
        """Their targets: (B,)."""
        return self._targets[rows]


class Classes(nn.Module):
    """The mean over tokens, and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.linear(x.mean(1))
        return logits


def shaped(shape: str, setting: Setting) -> tuple[nn.Module, Rows, int]:
    """A model, samples for it, and how many of its blocks are half of them."""
    width, num_heads, num = (768, 12, 12) if setting.is_full else (32, 4, 4)
    size, length = (224, 128) if setting.is_full else (32, 8)
    num_samples = NUM_BATCHES * setting.size(BATCH_SIZE, 4)
    torch.manual_seed(1)
    if shape == "ViT-B":
        model: nn.Module = VisionTransformer(
            image_side=size,
            num_channels=3,
            num_classes=10,
            patch_size=16,
            blocks=Blocks(width, num, num_heads, 4 * width),
        )
        return model, Rows(torch.randn(num_samples, 3, size, size)), num // 2
    blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num)))
    model = nn.Sequential(nn.Embedding(NUM_WORDS, width), blocks, Classes(width))
    return model, Rows(torch.randint(NUM_WORDS, (num_samples, length))), num // 2


def measured(shape: str, contestant: str, setting: Setting) -> Row:
    """Seconds of a step, in epochs behind the one in which a cache fills."""
    model, rows, half = shaped(shape, setting)
    loader = hocket.SampleLoader(rows, rows.num_samples // NUM_BATCHES, varied=False)
    options: dict[str, Any] = {}
    if contestant != "none":
        options["freeze"] = Listed({1: half})
    results: list[Any] = []
    with ExitStack() as stack:
        if contestant.endswith("cache"):
            folder = stack.enter_context(TemporaryDirectory())
            options["cache"] = hocket.Cache(folder, ram_bytes=4 << 30, disk_bytes=0)
        pipeline = stack.enter_context(
            hocket.Pipeline(
                model.to(setting.device),
                F.cross_entropy,
                optimizer=partial(torch.optim.AdamW, lr=1e-4),
                example=loader.example(),
                schedule="1f1b",
                num_microbatches=2,
                world=single_process_world(setting.device),
                **options,
            )
        )

        def epoch() -> None:
            results.extend(pipeline.train(loader))

        seconds = [seconds_of(setting.device, epoch) for _ in range(NUM_EPOCHS)]
    last = results[-1]
    return {
        "step": spread([x / NUM_BATCHES for x in seconds[2:]]),
        "first_epochs_s": seconds[:2],
        "num_frozen": last.num_frozen,
        "cache_hits": last.cache_hits,
        "holds": last.num_frozen == (0 if contestant == "none" else half),
    }


TIMED: Final = [f"freezing {x}, {y}" for x in SHAPES for y in _CONTESTANTS]
CHECKS: Final[Checks] = {
    "elastic freezing": elastic,
    **{
        f"freezing {x}, {y}": partial(measured, x, y)
        for x in SHAPES
        for y in _CONTESTANTS
    },
}
