"""hocket and torch.distributed.pipelining side by side, in the same two processes.

    python -m bench.pipeline_vs_torch.run [--cases large small] [--rounds 20]
        [--schedules zb-v dualpipe-v] [--compiled zb-v]

All schedules of a model belong to one run: each round plays hocket's and torch's step
of every schedule once, and the bounds, so that any two of them may be compared.
Before that, every contestant's gradients are compared with the plain loop's.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

import hocket
from bench.measure import alternate, environment, write_result
from bench.models import CASES
from bench.pipeline_vs_torch.field import Field
from hocket.run.cluster.world import join_world

RESULTS: Final = Path(__file__).parent / "results"
SCHEDULES: Final = (
    *("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs"),
    *("zb-h1", "interleaved-zb", "zb-v", "dualpipe-v"),
    "zb-auto",  # hocket's alone
)
COMPILED: Final = ("zb-v", "dualpipe-v")

# Rounds of each model, and steps of the same contestant before each that counts: where
# steps are short, what another one left in the caches is no small part of them.
NUM_ROUNDS: Final = {"large": 7, "middle": 12, "small": 20, "resnet": 16}
NUM_BEFORE: Final = {"small": 1}
NUM_WARM: Final = 1  # after the step whose gradients were looked at


def main() -> None:
    """Measure what was asked for, and keep it as JSON after each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument(
        "--schedules", nargs="+", default=SCHEDULES, choices=hocket.SCHEDULES
    )
    parser.add_argument(
        "--compiled", nargs="*", default=COMPILED, help="those of the schedules"
    )
    parser.add_argument("--rounds", type=int, help="as many for every model")
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu.json")
    arguments = parser.parse_args()
    schedules = list(arguments.schedules)
    compiled = [name for name in arguments.compiled if name in schedules]
    rows: list[dict[str, Any]] = []
    for case in arguments.cases:
        num_rounds = arguments.rounds or NUM_ROUNDS[case]
        with tempfile.TemporaryDirectory() as folder:
            results = hocket.launch(
                "bench.pipeline_vs_torch.run:worker",
                [case, schedules, compiled, num_rounds, folder],
                num_workers=2,
                run_dir=Path(folder),
                timeout_s=300.0,
            )
        for row in results[0]:
            print_row(row)
        rows += results[0]
        write_result(arguments.output, {"environment": environment(), "rows": rows})


def worker(
    name: str, schedules: list[str], compiled: list[str], num_rounds: int, folder: str
) -> list[dict[str, Any]]:
    """What each of the two processes does."""
    torch.set_num_threads(1)
    field = Field(CASES[name], join_world(), folder)
    for schedule in schedules:
        field.enter(schedule)
    for schedule in compiled:
        field.enter_compiled(schedule)
    seconds = alternate(
        field.steps,
        field.world,
        num_rounds=num_rounds,
        num_warm=NUM_WARM,
        num_before=NUM_BEFORE.get(name, 0),
    )
    rows = [*field.rows(seconds, num_rounds)]
    field.close()
    return rows


def print_row(row: dict[str, Any]) -> None:
    """One line of the table."""
    times = [
        f"{name} {row[name]['median_ms']:9.2f} ms"
        for name in ("hocket", "torch", "bound")
        if name in row
    ]
    ratios = [
        f"{key.replace('_over_', '/')} {row[key]['of_medians']:.3f}"
        for key in ("hocket_over_torch", "hocket_over_bound", "torch_over_bound")
        if key in row
    ]
    title = f"{row['case']:<8}{row['schedule'] + ', compiled' * row['compiled']:<22}"
    print("   ".join([title, *times, *ratios]), flush=True)


if __name__ == "__main__":
    main()
