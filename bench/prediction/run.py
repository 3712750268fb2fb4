"""Simulated against measured step time, two workers.

    python -m bench.prediction.run [--cases large small] [--rounds 20]

The profile that the prediction stands on is taken in the same processes just before.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

import hocket
from bench.measure import environment, spread, write_result
from bench.models import CASES
from hocket.run.world import join_world

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs")
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Measure what was asked for, and keep it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu.json")
    arguments = parser.parse_args()
    rows: list[Any] = []
    for case in arguments.cases:
        with tempfile.TemporaryDirectory() as folder:
            results = hocket.launch(
                "bench.prediction.run:worker",
                [case, list(arguments.schedules), arguments.rounds],
                num_workers=2,
                run_dir=Path(folder),
            )
        rows += results[0]
        for row in results[0]:
            print(row, flush=True)
    write_result(arguments.output, {"environment": environment(), "rows": rows})


def worker(
    case_name: str, schedules: list[str], num_rounds: int
) -> list[dict[str, Any]]:
    """What each of the two processes does."""
    world = join_world()
    case = CASES[case_name]
    batch = case.batch()
    rows = []
    for schedule in schedules:
        torch.manual_seed(0)
        pipeline = hocket.Pipeline(
            case.make(),
            case.loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
            example=batch,
            schedule=schedule,
            num_microbatches=case.num_microbatches,
            stages_per_device=2 if "1f1b" != schedule != "gpipe" else None,
            world=world,
        )
        for _ in range(3):
            pipeline.step(batch)
        seconds = []
        for _ in range(num_rounds):
            pipeline.step(batch)
            seconds.append(pipeline.measured().makespan_s)
        predicted = pipeline.predicted.makespan_s
        rows.append(
            {
                "case": case_name,
                "schedule": schedule,
                "num_rounds": num_rounds,
                "measured": spread(seconds),
                "predicted_ms": round(predicted * 1e3, 4),
                "error": round(predicted / median(seconds) - 1.0, 4),
                "bubble_predicted": round(pipeline.predicted.bubble_fraction, 4),
                "bubble_measured": round(pipeline.measured().bubble_fraction, 4),
            }
        )
        pipeline.close()
    return rows


if __name__ == "__main__":
    main()
