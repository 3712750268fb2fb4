"""Layers that freeze on accelerators: first that it is exact, then how fast.

    python -m bench.gpu.freezing [--size full|small] [--output FILE]

Two workers share one GPU (gloo, and messages staged through pinned memory), or have one
each (NCCL). Without a GPU it runs on the CPU, which shows only that the script
works. Takes under ten minutes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

import hocket
from bench.gpu.check_then_measure import (
    NUM_ROUNDS,
    SIZES,
    STEPS_IN_TURN,
    TOLERANCE,
    relative_error,
    run,
)
from bench.gpu.checked import synchronize
from bench.measure import alternate, paired_ratio, spread
from bench.models import transformer
from hocket.freeze import Listed
from hocket.run.cluster.world import World, join_world
from hocket.run.data.batch import split_batch

NUM_PARTS: Final = 4
FREEZES: Final = Listed({1: 3, 2: 5}, every_steps=3)  # of seven layers before the head
FROZEN_FROM: Final = {3: 3, 6: 5}  # layers by step, as a loop freezes them
NUM_CHECKED_STEPS: Final = 9
NUM_FROZEN: Final = 4
SHAPES: Final[dict[str, dict[int, tuple[int, int]]]] = {
    "first shape": {},
    "replicas": {3: (1, 2)},
}


def worker(backend: str, size: str) -> dict[str, Any]:
    """What each worker does."""
    torch.backends.cuda.matmul.allow_tf32 = False
    world = join_world(backend=backend)
    return {
        "device": str(world.device),
        "exactness": [check(name, world) for name in SHAPES],
        "speed": [*measured(world, *SIZES[size])],
    }


def check(name: str, world: World) -> dict[str, Any]:
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
    with make_pipeline(model, batches[0], FREEZES, SHAPES[name], world) as pipeline:
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


def measured(
    world: World, width: int, num_samples: int, num_tokens: int
) -> Iterator[dict[str, Any]]:
    """Steps with nothing frozen and with half of the layers frozen, in turn."""
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(num_samples, num_tokens, width, generator=rng).to(world.device)
    batch = x, torch.zeros_like(x)
    half = Listed({1: NUM_FROZEN}, every_steps=1)
    cases = {
        "nothing frozen, 2x1": (None, None),
        "half frozen, 2x1": (half, {}),
        "half frozen, 1x2": (half, {NUM_FROZEN: (1, 2)}),
    }
    with ExitStack() as stack:
        pipelines = {
            name: stack.enter_context(
                make_pipeline(net(width, torch.float32), batch, *case, world)
            )
            for name, case in cases.items()
        }

        def steps(pipeline: hocket.Pipeline) -> None:
            for _ in pipeline.train([batch] * STEPS_IN_TURN):
                pass
            synchronize(world.device)

        transitions_s = {
            name: sum(x.transition_s for x in pipeline.train([batch] * 2))
            for name, pipeline in pipelines.items()
        }
        seconds = alternate(
            {name: partial(steps, pipeline) for name, pipeline in pipelines.items()},
            world,
            num_rounds=NUM_ROUNDS,
            num_warm=2,
        )
        first = next(iter(cases))
        for name, own in seconds.items():
            yield {
                "case": name,
                "step": spread([x / STEPS_IN_TURN for x in own]),
                "times_as_fast": paired_ratio(seconds[first], own),
                "transition_ms": round(transitions_s[name] * 1e3, 1),
                "predicted_ms": round(pipelines[name].predicted.makespan_s * 1e3, 4),
            }


if __name__ == "__main__":
    run("freezing", __doc__)
