"""One stage over two shards beside torch's own FSDP2 by hand: time, memory, prediction.

    python -m bench.sharded.run

Two workers of one thread train the same blocks on the same microbatches, in turn: a
pipeline with num_shards=2, and a loop that calls `fully_shard` on each block and on the
model, gathers once in a step, and reduces behind its last microbatch, as torch advises
for accumulation. Memory is that of jobs of their own: the most anonymous memory of a
worker in a few steps, without what it had behind a step of a model of next to no width,
which has imported and captured the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hocket
from bench.measure import environment, spread, write_result
from bench.start_memory.run import Peak
from hocket.run.cluster.world import join_world

RESULTS: Final = Path(__file__).parent / "results"
NUM_BLOCKS: Final = 8
WIDTH: Final = 512
NUM_CLASSES: Final = 64
NUM_WARM: Final = 3


class Block(nn.Module):
    """A perceptron around a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The input and what the perceptron makes of it."""
        y: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + y


def make_model(width: int = WIDTH) -> nn.Sequential:
    """The same on all workers."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(Block(width) for _ in range(NUM_BLOCKS)), nn.Linear(width, NUM_CLASSES)
    )


def make_batch(num_samples: int, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """The same on all workers."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, width, generator=draw)
    return x, torch.randint(0, NUM_CLASSES, (num_samples,), generator=draw)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of both."""
    return torch.optim.AdamW(parameters, 1e-3)


def by_hand(batch: tuple[Tensor, Tensor], num_microbatches: int) -> Callable[[], float]:
    """A step of FSDP2, as one writes it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = make_model(batch[0].shape[1])
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp_shard",))
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    root = fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = optimizer_of(model.parameters())
    own = [x.chunk(size)[rank].chunk(num_microbatches) for x in batch]

    def step() -> float:
        total = 0.0
        for i, (x, y) in enumerate(zip(*own, strict=True)):
            is_last = i == num_microbatches - 1
            root.set_requires_gradient_sync(is_last)
            root.set_reshard_after_backward(is_last)
            root.set_is_last_backward(is_last)
            loss = nn.functional.cross_entropy(model(x), y) / num_microbatches
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def by_hocket(
    batch: tuple[Tensor, Tensor], num_microbatches: int, world: Any
) -> tuple[Callable[[], float], hocket.Pipeline]:
    """A step of a pipeline of one sharded stage."""
    pipeline = hocket.Pipeline(
        make_model(batch[0].shape[1]),
        nn.functional.cross_entropy,
        optimizer=optimizer_of,
        example=batch,
        schedule="1f1b",
        num_microbatches=num_microbatches,
        num_shards=world.world_size,
        world=world,
    )
    return lambda: pipeline.step(batch).loss, pipeline


def in_turn(num_samples: int, num_microbatches: int, num_steps: int) -> dict[str, Any]:
    """Steps of both in one job, one after the other."""
    torch.set_num_threads(1)
    world, batch = join_world(), make_batch(num_samples)
    ours, pipeline = by_hocket(batch, num_microbatches, world)
    theirs = by_hand(batch, num_microbatches)
    taken: dict[str, list[float]] = {"hocket": [], "FSDP2": []}
    losses: dict[str, list[float]] = {"hocket": [], "FSDP2": []}
    for number in range(num_steps + NUM_WARM):
        for name, step in (("hocket", ours), ("FSDP2", theirs)):
            world.barrier("step")
            begin_s = perf_counter()
            losses[name].append(step())
            if number >= NUM_WARM:
                taken[name].append(perf_counter() - begin_s)
    predicted_s = pipeline.predicted.step_s
    everywhere = world.gather_json([losses["FSDP2"][-1]], "losses")  # of each half
    pipeline.close()
    ratios = [a / b for a, b in zip(taken["hocket"], taken["FSDP2"], strict=True)]
    return {
        **{name: spread(seconds) for name, seconds in taken.items()},
        "ratio": round(median(ratios), 3),
        "predicted_ms": round(predicted_s * 1e3, 2),
        "prediction_error": round(predicted_s / median(taken["hocket"]) - 1, 3),
        "last_losses": [losses["hocket"][-1], sum(x for (x,) in everywhere) / 2],
    }


def memory(name: str, num_samples: int, num_microbatches: int) -> dict[str, float]:
    """The most memory of a worker in a few steps, above that of a model of no width."""
    torch.set_num_threads(1)
    world = join_world()
    for width in (8, WIDTH):
        before = Peak.now()
        batch = make_batch(num_samples, width)
        if name == "hocket":
            step, _ = by_hocket(batch, num_microbatches, world)
        else:
            step = by_hand(batch, num_microbatches)
        step()
    peak = Peak()
    for _ in range(3):
        step()
    return {"peak_mb": (peak.end() - before) / 1e6}


def main() -> None:
    """Measure, print, and keep it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu.json")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for number in arguments.microbatches:
        sizes = arguments.samples, number
        row, _ = hocket.launch(in_turn, (*sizes, arguments.steps), num_workers=2)
        for name in ("hocket", "FSDP2"):
            found = hocket.launch(memory, (name, *sizes), num_workers=2)
            row[f"{name}_peak_mb"] = round(max(x["peak_mb"] for x in found), 1)
        row |= {"num_microbatches": number, "num_samples": arguments.samples}
        rows.append(row)
        print(row, flush=True)
    write_result(arguments.output, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
