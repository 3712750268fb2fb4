"""Simulated against measured step time, two workers.

    python -m bench.prediction.run [--cases large small] [--profiles 5] [--rounds 6]

Each prediction stands on a profile of its own, taken in the same processes just before
the steps that it is compared with; the error reported is the median over the profiles.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

import hocket
from bench.measure import environment, spread, write_result
from bench.models import CASES, Case
from hocket.run.cluster.world import World, join_world

SCHEDULES = (
    *("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs"),
    *("zb-h1", "zb-auto", "zb-v"),
)
STAGES_PER_DEVICE = {"interleaved-1f1b": 2, "looped-bfs": 2, "zb-v": 2}
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Measure what was asked for, and keep it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    parser.add_argument("--profiles", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu.json")
    arguments = parser.parse_args()
    rows: list[Any] = []
    for case in arguments.cases:
        with tempfile.TemporaryDirectory() as folder:
            results = hocket.launch(
                "bench.prediction.run:worker",
                [
                    case,
                    list(arguments.schedules),
                    arguments.profiles,
                    arguments.rounds,
                ],
                num_workers=2,
                run_dir=Path(folder),
            )
        rows += results[0]
        for row in results[0]:
            print(row, flush=True)
    write_result(arguments.output, {"environment": environment(), "rows": rows})


def worker(
    case_name: str, schedules: list[str], num_profiles: int, num_rounds: int
) -> list[dict[str, Any]]:
    """What each of the two processes does."""
    world = join_world()
    case = CASES[case_name]
    return [
        _summary(
            case_name,
            schedule,
            [_predict(world, case, schedule, num_rounds) for _ in range(num_profiles)],
        )
        for schedule in schedules
    ]


@dataclass(frozen=True, slots=True)
class Sample:
    """One profile and the steps measured right after it."""

    predicted_s: float
    measured_s: list[float]
    bubble_predicted: float
    bubble_measured: float

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted_s / median(self.measured_s) - 1.0


def _predict(world: World, case: Case, schedule: str, num_rounds: int) -> Sample:
    batch = case.batch()
    torch.manual_seed(0)
    pipeline = hocket.Pipeline(
        case.make(),
        case.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        example=batch,
        schedule=schedule,
        num_microbatches=case.num_microbatches,
        stages_per_device=STAGES_PER_DEVICE.get(schedule),
        world=world,
    )
    for _ in range(2):
        pipeline.step(batch)
    steps = []
    for _ in range(num_rounds):
        pipeline.step(batch)
        steps.append(pipeline.measured())
    pipeline.close()
    predicted = pipeline.predicted
    return Sample(
        predicted.makespan_s,
        [step.makespan_s for step in steps],
        predicted.bubble_fraction,
        median(step.bubble_fraction for step in steps),
    )


def _summary(case: str, schedule: str, samples: list[Sample]) -> dict[str, Any]:
    errors = sorted(sample.error for sample in samples)
    return {
        "case": case,
        "schedule": schedule,
        "num_profiles": len(samples),
        "num_rounds": len(samples[0].measured_s),
        "measured": spread([s for sample in samples for s in sample.measured_s]),
        "predicted_ms": round(median(s.predicted_s for s in samples) * 1e3, 4),
        "error": round(median(errors), 4),
        "errors": [round(error, 4) for error in errors],
        "bubble_predicted": round(median(s.bubble_predicted for s in samples), 4),
        "bubble_measured": round(median(s.bubble_measured for s in samples), 4),
    }


if __name__ == "__main__":
    main()
