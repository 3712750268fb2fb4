"""Four devices as one pipeline, and as two replicas of half its length; all emulated.

    python -m bench.flush_free.replicas [--rounds 5]

Ops sleep instead of computing (bench/emulated/layers.py), so that two cores are four
devices; messages, reductions over replicas and updates are real. All contestants train
one model on the same batch, in the same four processes and in turn, as in `run.py`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

import hocket
from bench.emulated.layers import LayerSeconds, numbered_batch
from bench.emulated.rounds import sleeping_pipeline
from bench.flush_free.field import predicted_bubble, predicted_step_s
from bench.flush_free.stretch import NUM_STEPS, Stretch, in_turn, stretch_of
from bench.measure import environment, paired_ratio, spread, write_result
from hocket.core.layout import WorkerLayout
from hocket.run.cluster.world import join_world
from hocket.schedules import SCHEDULES

KEPT: Final = Path(__file__).parent / "results" / "replicas.json"
LAYOUTS: Final = ("4x1", "2x2")
NAMES: Final = ("1f1b", "pipedream-2bw", "wpipe", "wpipe-overlapped")
COMPARED: Final = ("1f1b", "2x2")
NUM_WORKERS: Final = 4
NUM_LAYERS: Final = 8
NUM_MICROBATCHES: Final = 8  # of a batch, over all replicas
SAMPLES: Final = 4  # in a microbatch
CHANNELS: Final = 64
LAYER: Final = LayerSeconds(10e-3, 20e-3, 0.0)  # a backward takes twice as long


def main() -> None:
    """Measure all layouts and schedules, and keep them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=KEPT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = hocket.launch(
            "bench.flush_free.replicas:worker",
            [arguments.rounds, folder, LAYER.forward_s],
            num_workers=NUM_WORKERS,
            run_dir=Path(folder),
        )
    for row in results[0]:
        print(row, flush=True)
    result = {"environment": environment(), "rows": results[0]}
    write_result(arguments.output, result)


def worker(num_rounds: int, folder: str, forward_s: float) -> list[dict[str, Any]]:
    """Measure in one of the processes; return a row for each contestant.

    Args:
        num_rounds: the rounds that count.
        folder: for the profile, which all contestants share.
        forward_s: the seconds of each layer's forward; a backward takes twice that.
    """
    torch.set_num_threads(1)
    world = join_world()
    layer = LayerSeconds(forward_s, 2 * forward_s, 0.0)
    batch = numbered_batch(NUM_MICROBATCHES, SAMPLES, CHANNELS)
    pipelines: dict[tuple[str, str], hocket.Pipeline] = {}
    with ExitStack() as stack:
        for name, layout in product(NAMES, LAYOUTS):
            shape = WorkerLayout.parse(layout)
            num_stages = shape.num_devices * SCHEDULES[name].stages_per_device
            pipeline = sleeping_pipeline(
                layer,
                NUM_LAYERS,
                NUM_LAYERS // num_stages,
                CHANNELS,
                example=batch,
                schedule=name,
                num_microbatches=NUM_MICROBATCHES // shape.num_replicas,
                num_replicas=shape.num_replicas,
                profile_dir=folder,
                world=world,
            )
            pipelines[name, layout] = stack.enter_context(pipeline)
        turns: dict[str, Callable[[], Stretch]] = {
            " ".join(key): partial(_stretch, pipeline, batch)
            for key, pipeline in pipelines.items()
        }
        stretches = in_turn(turns, world, num_rounds)
        work_s = NUM_MICROBATCHES * NUM_LAYERS * 3 * forward_s / NUM_WORKERS
        found = {key: stretches[" ".join(key)] for key in pipelines}
        return [
            _row(key, pipelines[key], found[key], found[COMPARED], work_s)
            for key in sorted(pipelines, key=lambda key: key[1])
        ]


def _stretch(pipeline: hocket.Pipeline, batch: Any) -> Stretch:
    """Take one step more than without replicas: the last two results come together."""
    return stretch_of(pipeline.train([batch] * (NUM_STEPS + 1)), num_after=2)


def _row(
    key: tuple[str, str],
    pipeline: hocket.Pipeline,
    own: list[Stretch],
    compared: list[Stretch],
    work_s: float,
) -> dict[str, Any]:
    plan, step_s = pipeline.plan, [stretch.step_s for stretch in own]
    bubbles = [stretch.bubble for stretch in own if stretch.bubble is not None]
    predicted_s = predicted_step_s(plan)
    return {
        "is_emulated": True,
        "schedule": key[0],
        "layout": key[1],
        "num_microbatches": plan.schedule.program.num_microbatches_of(0),
        "num_rounds": len(step_s),
        "step": spread(step_s),
        "predicted_ms": round(predicted_s * 1e3, 4),
        "error": round(predicted_s / median(step_s) - 1, 4),
        "work_ms": round(work_s * 1e3, 4),
        "bubble": {
            "predicted": round(predicted_bubble(plan), 4),
            "measured": round(median(bubbles), 4),
        },
        "speedup": paired_ratio([stretch.step_s for stretch in compared], step_s),
    }


if __name__ == "__main__":
    main()
