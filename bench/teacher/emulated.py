"""A teacher and its student on 4 and 8 emulated devices: measured beside predicted.

    python -m bench.teacher.emulated [--rounds 5]

Ops sleep instead of computing (bench/emulated/layers.py), so that two cores are as many
devices as it takes; messages and updates are real. All schedules of one number of
devices train in the same processes, in turn, with the teacher a batch ahead.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor

import hocket
from bench.emulated.layers import LayerSeconds, SleepingModel, numbered_batch
from bench.flush_free.field import predicted_bubble, predicted_step_s
from bench.flush_free.stretch import NUM_STEPS, Stretch, in_turn, stretch_of
from bench.measure import environment, spread, write_result
from hocket.run.cluster.world import join_world

KEPT: Final = Path(__file__).parent / "results" / "emulated.json"
NUM_DEVICES: Final = (4, 8)
SCHEDULES: Final = ("gpipe", "1f1b", "zb-h1")
SAMPLES: Final = 2  # in a microbatch
CHANNELS: Final = 64
TEACHER: Final = LayerSeconds(10e-3, 0.0, 0.0)
STUDENT: Final = LayerSeconds(10e-3, 10e-3, 10e-3)


def main() -> None:
    """Measure all, and keep them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=KEPT)
    arguments = parser.parse_args()
    rows: list[Any] = []
    for num_devices in NUM_DEVICES:
        with tempfile.TemporaryDirectory() as folder:
            results = hocket.launch(
                "bench.teacher.emulated:worker",
                [arguments.rounds, folder],
                num_workers=num_devices,
                run_dir=Path(folder),
                timeout_s=120.0,
            )
        for row in results[0]:
            print(row, flush=True)
        rows += results[0]
    write_result(arguments.output, {"environment": environment(), "rows": rows})


def worker(num_rounds: int, folder: str) -> list[dict[str, Any]]:
    """Measure in one of the processes; return a row for each schedule.

    Args:
        num_rounds: the rounds that count.
        folder: for the profiles, which all schedules share.
    """
    torch.set_num_threads(1)
    world = join_world()
    p = world.world_size
    batch = numbered_batch(p, SAMPLES, CHANNELS)
    pipelines: dict[str, hocket.Pipeline] = {}
    with ExitStack() as stack:
        for schedule in SCHEDULES:
            torch.manual_seed(0)
            pipeline = hocket.Pipeline(
                SleepingModel([STUDENT] * p, CHANNELS),
                difference,
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
                example=batch,
                schedule=schedule,
                num_microbatches=p,
                cut=[f"layers.{i}" for i in range(1, p)],
                teachers={
                    "teacher": hocket.Teacher(
                        SleepingModel([TEACHER] * p, CHANNELS),
                        cut=[f"layers.{i}" for i in range(1, p)],
                    )
                },
                profile_dir=folder,
                world=world,
            )
            pipelines[schedule] = stack.enter_context(pipeline)
        turns: dict[str, Callable[[], Stretch]] = {
            name: partial(_stretch, pipeline, batch)
            for name, pipeline in pipelines.items()
        }
        stretches = in_turn(turns, world, num_rounds)
        return [_row(x, p, pipelines[x], stretches[x]) for x in SCHEDULES]


def difference(output: Tensor, targets: Tensor, teachers: Any) -> Tensor:
    """A loss that takes no time."""
    return (output - targets + 0.0 * teachers["teacher"].own).mean()


def _stretch(pipeline: hocket.Pipeline, batch: Any) -> Stretch:
    return stretch_of(pipeline.train([batch] * NUM_STEPS))


def _row(
    schedule: str, p: int, pipeline: hocket.Pipeline, own: list[Stretch]
) -> dict[str, Any]:
    plan, step_s = pipeline.plan, [stretch.step_s for stretch in own]
    predicted_s = predicted_step_s(plan)
    each_s = TEACHER.forward_s + STUDENT.forward_s
    work_s = p * (each_s + STUDENT.input_grad_s + STUDENT.weight_grad_s)
    waits_s = (p - 1) * (3 * STUDENT.forward_s) - p * TEACHER.forward_s
    return {
        "is_emulated": True,
        "schedule": schedule,
        "num_devices": p,
        "num_microbatches": p,
        "num_rounds": len(step_s),
        "step": spread(step_s),
        "predicted_ms": round(predicted_s * 1e3, 4),
        "error": round(predicted_s / median(step_s) - 1, 4),
        "work_ms": round(work_s * 1e3, 4),
        "formula_ms": round((work_s + max(0.0, waits_s)) * 1e3, 4),
        "bubble": {
            "predicted": round(predicted_bubble(plan), 4),
            "measured": round(median(x.bubble for x in own if x.bubble is not None), 4),
        },
    }


if __name__ == "__main__":
    main()
