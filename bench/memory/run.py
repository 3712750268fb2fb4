"""Measured against predicted peak memory, of each of two workers.

    python -m bench.memory.run [--cases middle resnet] [--schedules gpipe 1f1b]

What a schedule must hold is what the simulator adds up: weights, gradients, optimizer
state, what forwards leave for their backwards, messages, and what the op at work takes
for itself. Measured is what the allocator had given out at most in one step.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import hocket
from bench.live_bytes import step_bytes
from bench.measure import environment, write_result
from bench.models import CASES, Case
from hocket.core.simulator.memory import peak_parts
from hocket.run.cluster.world import World, join_world

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs")
RECOMPUTE = ("none", "all")
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Measure what was asked for, and keep it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cases", nargs="+", default=["middle", "resnet"], choices=CASES
    )
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu.json")
    arguments = parser.parse_args()
    rows: list[Any] = []
    for case in arguments.cases:
        with tempfile.TemporaryDirectory() as folder:
            results = hocket.launch(
                "bench.memory.run:worker",
                [case, list(arguments.schedules), folder],
                num_workers=2,
                run_dir=Path(folder),
            )
        rows += results[0]
        for row in results[0]:
            print(row, flush=True)
    write_result(arguments.output, {"environment": environment(), "rows": rows})


def worker(case: str, schedules: list[str], folder: str) -> list[dict[str, Any]]:
    """What each of the two processes does."""
    torch.set_num_threads(1)
    world = join_world()
    return [
        row
        for schedule in schedules
        for recompute in RECOMPUTE
        for row in measure(world, CASES[case], schedule, recompute, folder)
    ]


def measure(
    world: World, case: Case, schedule: str, recompute: Any, folder: str
) -> list[dict[str, Any]]:
    """One row for each worker; the same on both."""
    batch = case.batch()
    torch.manual_seed(0)
    pipeline = hocket.Pipeline(
        case.make(),  # other workers' stages are freed, for nothing else refers to it
        case.loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        example=batch,
        schedule=schedule,
        num_microbatches=case.num_microbatches,
        stages_per_device=2 if "1f1b" != schedule != "gpipe" else None,
        recompute=recompute,
        profile_dir=folder,
        world=world,
    )
    for _ in range(2):
        pipeline.step(batch)
    found = asdict(step_bytes(pipeline, None, batch, batch))
    parts = peak_parts(pipeline.predicted, pipeline.plan.costs)
    pipeline.close()
    return [
        _row(case.name, schedule, recompute, device, asdict(part), measured)
        for device, (part, measured) in enumerate(
            zip(parts, world.gather_json(found), strict=True)
        )
    ]


def _row(
    case: str,
    schedule: str,
    recompute: str,
    device: int,
    predicted: dict[str, int],
    measured: dict[str, int],
) -> dict[str, Any]:
    must_hold = sum(predicted.values())
    peak = measured["rest_bytes"] + measured["added_bytes"]
    return {
        "case": case,
        "schedule": schedule,
        "recompute": recompute,
        "device": device,
        "must_hold_bytes": must_hold,
        "measured_bytes": peak,
        "over": round(peak / must_hold - 1.0, 4),
        "predicted": predicted,
        "measured": measured,
    }


if __name__ == "__main__":
    main()
