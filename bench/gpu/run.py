"""On an accelerator: first that results are exact, then how fast, how well predicted.

    python -m bench.gpu.run [--backend nccl|gloo] [--size full|small] [--output FILE]

One worker per GPU. Without a GPU it runs on the CPU (`--backend gloo --size small`),
which shows only that the script works.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

import hocket
from bench.gpu.checked import synchronize
from bench.gpu.checks import check_all, check_spans
from bench.gpu.machine import gpus
from bench.measure import (
    alternate,
    environment,
    paired_ratio,
    spread,
    write_result,
)
from bench.models import Case, resnet, transformer
from hocket.run.cluster.world import World, join_world
from hocket.run.data.batch import split_batch

RESULTS = Path(__file__).parent / "results"
NUM_ROUNDS = 20
SIZES = {
    "full": (
        Case("wide", lambda: transformer(2048), (512, 2048), 8, 8),
        Case("narrow", lambda: transformer(256), (128, 256), 16, 4),
        Case("resnet", resnet, (3, 32, 32), 8, 128, classes=10),
    ),
    "small": (
        Case("wide", lambda: transformer(64), (16, 64), 4, 2),
        Case("narrow", lambda: transformer(32), (8, 32), 4, 2),
        Case("resnet", resnet, (3, 8, 8), 2, 4, classes=10),
    ),
}


def main() -> None:
    """Check, then measure, and keep it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    has_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--backend", choices=("nccl", "gloo"), default="nccl" if has_gpu else "gloo"
    )
    parser.add_argument("--size", choices=SIZES, default="full" if has_gpu else "small")
    parser.add_argument(
        "--workers", type=int, default=max(1, torch.cuda.device_count())
    )
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--output", type=Path, default=RESULTS / "latest.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = hocket.launch(
            "bench.gpu.run:worker",
            [arguments.backend, arguments.size, arguments.rounds],
            num_workers=arguments.workers,
            run_dir=Path(folder),
            timeout_s=300,
        )
    result = {
        "environment": environment() | gpus(),
        "num_workers": arguments.workers,
        **results[0],
    }
    write_result(arguments.output, result)
    for row in [*result["exactness"], *result["speed"]]:
        print(row)
    if not all(row["holds"] for row in result["exactness"]):
        raise SystemExit("not exact: see above")
    if not all(row["spans"]["holds"] for row in result["speed"]):
        raise SystemExit("ops are not timed rightly: see `spans` above")


def worker(backend: str, size: str, num_rounds: int) -> dict[str, Any]:
    """What each worker does."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    world = join_world(backend=backend)
    return {
        "device": str(world.device),
        "exactness": check_all(world),
        "speed": [measure_case(case, world, num_rounds) for case in SIZES[size]],
    }


def measure_case(case: Case, world: World, num_rounds: int) -> dict[str, Any]:
    """The pipeline's step beside a plain loop over the same microbatches."""
    batch = tuple(x.to(world.device) for x in case.batch())
    parts = split_batch(batch, case.num_microbatches)
    torch.manual_seed(0)
    plain = case.make().to(world.device)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-4)
    torch.manual_seed(0)
    pipeline = hocket.Pipeline(
        case.make().to(world.device),
        case.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        example=batch,
        schedule="1f1b",
        num_microbatches=case.num_microbatches,
        world=world,
    )

    def plain_step() -> None:
        for part in parts:
            loss = case.loss(plain(*part.leaves), part.targets)
            (loss / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(world.device)

    def step() -> None:
        pipeline.step(batch)
        synchronize(world.device)

    seconds = alternate(
        {"plain": plain_step, "hocket": step},
        world,
        num_rounds=num_rounds,
        num_warm=3,
    )
    spans = check_spans(pipeline, batch, world.world_size)
    makespans = []
    for _ in range(5):
        pipeline.step(batch)
        makespans.append(pipeline.measured().makespan_s)
    peak_bytes = _peak_of(step, world)
    predicted = pipeline.predicted
    pipeline.close()
    return {
        "model": case.name,
        "num_parameters": sum(p.numel() for p in plain.parameters()),
        "hocket": spread(seconds["hocket"]),
        "plain": spread(seconds["plain"]),
        "hocket_over_plain": paired_ratio(seconds["hocket"], seconds["plain"]),
        "predicted_ms": round(predicted.makespan_s * 1e3, 4),
        "measured_ms": round(median(makespans) * 1e3, 4),
        "peak_bytes": peak_bytes,
        "spans": spans,
    }


def _peak_of(step: Any, world: World) -> int | None:
    """Bytes allocated at the highest point of a step; not known on a CPU."""
    if world.device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(world.device)
    step()
    return torch.cuda.max_memory_allocated(world.device)


if __name__ == "__main__":
    main()
