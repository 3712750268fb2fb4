"""hocket and torch.distributed.pipelining side by side, in the same two processes.

python -m bench.pipeline_vs_torch.run [--cases large small] [--rounds 20]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

import hocket
from bench.measure import alternate, environment, paired_ratio, spread, write_result
from bench.models import CASES, Case
from bench.pipeline_vs_torch.peer import bound_step, torch_step

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
    rows: list[dict[str, Any]] = []
    for case in arguments.cases:
        for schedule in arguments.schedules:
            with tempfile.TemporaryDirectory() as folder:
                results = hocket.launch(
                    "bench.pipeline_vs_torch.run:worker",
                    [case, schedule, arguments.rounds],
                    num_workers=2,
                    run_dir=Path(folder),
                )
            rows.append(results[0])
            print_row(results[0])
    write_result(arguments.output, {"environment": environment(), "rows": rows})


def worker(case: str, schedule: str, num_rounds: int) -> dict[str, Any]:
    """What each of the two processes does."""
    return _measure(CASES[case], schedule, num_rounds)


def _measure(case: Case, schedule: str, num_rounds: int) -> dict[str, Any]:
    looped = schedule in ("interleaved-1f1b", "looped-bfs")
    torch.manual_seed(0)
    batch = case.batch()
    pipeline = hocket.Pipeline(
        case.make(),
        case.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        example=batch,
        schedule=schedule,
        num_microbatches=case.num_microbatches,
        stages_per_device=2 if looped else None,
    )
    boundaries = tuple(
        int(name.split(".")[0]) for name in pipeline.plan.stage_names[1:]
    )
    rank = pipeline.world.rank
    steps = {
        "hocket": lambda: pipeline.step(batch),
        "torch": torch_step(case, case.make(), boundaries, schedule, rank),
        "bound": bound_step(case, case.make(), boundaries, rank),
    }
    seconds = alternate(steps, pipeline.world, num_rounds=num_rounds, num_warm=3)
    timeline = pipeline.measured()
    pipeline.close()
    return {
        "case": case.name,
        "schedule": schedule,
        "num_rounds": num_rounds,
        "boundaries": list(boundaries),
        **{name: spread(values) for name, values in seconds.items()},
        "hocket_over_torch": paired_ratio(seconds["hocket"], seconds["torch"]),
        "hocket_over_bound": paired_ratio(seconds["hocket"], seconds["bound"]),
        "torch_over_bound": paired_ratio(seconds["torch"], seconds["bound"]),
        "bubble": {
            "predicted": round(pipeline.predicted.bubble_fraction, 4),
            "measured": round(timeline.bubble_fraction, 4),
        },
    }


def print_row(row: dict[str, Any]) -> None:
    """One line of the table."""
    print(
        f"{row['case']:<8}{row['schedule']:<18}"
        f"hocket {row['hocket']['median_ms']:9.2f} ms   "
        f"torch {row['torch']['median_ms']:9.2f} ms   "
        f"bound {row['bound']['median_ms']:9.2f} ms   "
        f"hocket/torch {row['hocket_over_torch']['of_medians']:.3f}   "
        f"hocket/bound {row['hocket_over_bound']['of_medians']:.3f}   "
        f"torch/bound {row['torch_over_bound']['of_medians']:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
