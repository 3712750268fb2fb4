"""Four workers, the same model in four layouts: exactness, bytes moved, peak memory.

    python -m bench.sharded.four

    4x1     four stages             messages
    2x1x2   two stages, each over two shards
    1x1x4   one stage over four shards      gathers and reduce-scatters
    1x4     four replicas                   all-reduces

Bytes are those that a worker sends in a step: of its messages, and of collectives as
rings send them. Memory is the most anonymous and shared memory in three steps, in jobs
of their own, without what the same job holds with a model of next to no width.
"""

from __future__ import annotations

import argparse
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

import hocket
from bench.measure import environment, write_result
from bench.sharded.run import WIDTH, make_batch, make_model, optimizer_of
from bench.start_memory.run import Peak
from hocket.run.cluster.world import join_world
from hocket.run.comm.shm.sender import SharedMemorySender

RESULTS: Final = Path(__file__).parent / "results"
NUM_WORKERS: Final = 4
LAYOUTS: Final = {  # devices, replicas, shards
    "4x1": (4, 1, 1),
    "2x1x2": (2, 1, 2),
    "1x1x4": (1, 1, 4),
    "1x4": (1, 4, 1),
}
NUM_SAMPLES: Final = 256
NUM_PARTS: Final = 8  # microbatches of a batch, over all replicas and shards
NUM_STEPS: Final = 3


def count_bytes(sent: Counter[str]) -> None:
    """Count the bytes that this process sends from now on."""
    send = SharedMemorySender.send

    def sending(self: Any, tag: int, tensors: Any, schema: Any) -> None:
        sent["messages"] += sum(x.nbytes for x in tensors)
        send(self, tag, tensors, schema)

    def counted(name: str, kind: str, of: str, times: int) -> None:
        function = getattr(dist, name)

        def call(*args: Any, **options: Any) -> Any:
            size = dist.get_world_size(options.get("group"))
            num_bytes = (options[of] if of in options else args[0]).nbytes
            sent[kind] += times * num_bytes * (size - 1) // size
            return function(*args, **options)

        setattr(dist, name, call)

    setattr(SharedMemorySender, "send", sending)  # noqa: B010 - it is a method
    counted("all_gather_single", "gathers", "output", 1)
    counted("reduce_scatter_single", "reductions", "input", 1)
    counted("all_reduce", "reductions", "tensor", 2)


def make_pipeline(layout: str, width: int, world: Any, dtype: torch.dtype) -> Any:
    """A pipeline of the blocks, its model, and its batch."""
    _, replicas, shards = LAYOUTS[layout]
    x, y = make_batch(NUM_SAMPLES, width)
    model, batch = make_model(width).to(dtype), (x.to(dtype), y)
    pipeline = hocket.Pipeline(
        model,
        nn.functional.cross_entropy,
        optimizer=optimizer_of,
        example=batch,
        schedule="1f1b",
        num_microbatches=NUM_PARTS // (replicas * shards),
        num_replicas=replicas,
        num_shards=shards,
        world=world,
    )
    return pipeline, batch


def moved(layout: str) -> dict[str, float]:
    """The bytes that this worker sends in a step."""
    torch.set_num_threads(1)
    sent: Counter[str] = Counter()
    count_bytes(sent)
    pipeline, batch = make_pipeline(layout, WIDTH, join_world(), torch.float32)
    pipeline.step(batch)
    sent.clear()
    for _ in range(NUM_STEPS):
        pipeline.step(batch)
    found = {name: value / NUM_STEPS / 1e6 for name, value in sent.items()}
    predicted = pipeline.predicted.step_s
    pipeline.close()
    return {**found, "predicted_s": predicted}


def memory(layout: str) -> dict[str, float]:
    """The most memory of this worker in a few steps, above that of a narrow model."""
    torch.set_num_threads(1)
    world, before = join_world(), 0
    for width in (8, WIDTH):
        pipeline, batch = make_pipeline(layout, width, world, torch.float32)
        pipeline.step(batch)
        if width != WIDTH:
            before = Peak.now()
            pipeline.close()
    peak = Peak()
    for _ in range(NUM_STEPS):
        pipeline.step(batch)
    return {"peak_mb": (peak.end() - before) / 1e6}


def weights(layout: str) -> float:
    """The largest difference to a plain loop in float64, after a few steps."""
    torch.set_num_threads(1)
    pipeline, batch = make_pipeline(layout, 64, join_world(), torch.float64)
    for _ in range(NUM_STEPS):
        pipeline.step(batch)
    found = pipeline.state_dict()
    model = make_model(64).double()
    optimizer = optimizer_of(model.parameters())
    for _ in range(NUM_STEPS):
        for x, y in zip(*(part.chunk(NUM_PARTS) for part in batch), strict=True):
            (nn.functional.cross_entropy(model(x), y) / NUM_PARTS).backward()
        optimizer.step()
        optimizer.zero_grad()
    pipeline.close()
    return max(
        float((found[name] - x).abs().max() / x.abs().max())
        for name, x in model.state_dict().items()
    )


def main() -> None:
    """Measure, print, and keep it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS / "four.json")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for layout in LAYOUTS:
        run = partial(hocket.launch, num_workers=NUM_WORKERS, timeout_s=120.0)
        sent, peaks, far = (run(job, (layout,)) for job in (moved, memory, weights))
        row: dict[str, Any] = {"layout": layout, "difference": max(far)}
        for name in ("messages", "gathers", "reductions"):
            row[f"{name}_mb"] = round(max(x.get(name, 0.0) for x in sent), 2)
        row["peak_mb"] = round(max(x["peak_mb"] for x in peaks), 1)
        row["predicted_ms"] = round(1e3 * sent[0]["predicted_s"], 1)
        rows.append(row)
        print(row, flush=True)
    write_result(arguments.output, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
