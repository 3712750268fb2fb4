"""Emulated devices: does the runtime keep the order and the time of the simulation?

    python -m bench.emulated.run [--workers 4 8] [--schedules zb-v 1f1b]

Eight workers on two cores. Each op sleeps a given time (bench/emulated/layers.py); all
else is real: processes, messages, handing over, autograd, updates. What the simulator
predicts, with what ops and messages cost in place, is compared with what happened.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import torch

import hocket
from bench.emulated.layers import LayerSeconds, as_done, numbered_batch
from bench.emulated.rounds import sleeping_pipeline, train_rounds
from bench.measure import environment, spread, write_result
from bench.runnable import runnable
from hocket.core.costs import Costs, StageCost
from hocket.core.op import Kind
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.core.timelines.timeline import Timeline
from hocket.draw import Style, to_svg
from hocket.run.cluster.world import World, join_world
from hocket.schedules import SCHEDULES

RESULTS: Final = Path(__file__).parent / "results"
WORKERS: Final = (4, 8)
PICTURED: Final = "zb-v"
TARGET: Final = 0.03
SAMPLES: Final = 4  # in a microbatch
CHANNELS: Final = 64
# Of a device's whole share; in the proportions of a transformer's layer.
SHARE: Final = LayerSeconds(forward_s=18e-3, input_grad_s=21e-3, weight_grad_s=15e-3)


@dataclass(frozen=True, slots=True)
class Job:
    """What the workers do.

    Args:
        schedules: by name.
        num_microbatches: of each step.
        num_rounds: steps that are measured.
        share: seconds of a device's share of the model.
        folder: for the profile, which is the same for all schedules.
        picture: where to draw one of the schedules; nowhere if empty.
    """

    schedules: list[str]
    num_microbatches: int
    num_rounds: int
    share: LayerSeconds
    folder: str
    picture: str = ""


def main() -> None:
    """Measure what was asked for, and keep it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu.json")
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Any] = []
    for num_workers in arguments.workers:
        num_microbatches = 2 * num_workers
        names = runnable(num_workers, num_microbatches)
        wanted = [x for x in names if x in (arguments.schedules or names)]
        picture = str(arguments.output.with_suffix(".svg"))
        with tempfile.TemporaryDirectory() as folder:
            results = hocket.launch(
                "bench.emulated.run:worker",
                [wanted, num_microbatches, arguments.rounds, folder, picture],
                num_workers=num_workers,
                run_dir=Path(folder),
            )
        rows += results[0]
        for row in results[0]:
            print(row, flush=True)
    result = {"environment": environment(), "target": TARGET, "rows": rows}
    write_result(arguments.output, result)


def worker(
    schedules: list[str],
    num_microbatches: int,
    num_rounds: int,
    folder: str,
    picture: str,
    num_ms: float | None = None,
) -> list[dict[str, Any]]:
    """What each process does: a row for each schedule, the same on all.

    Args:
        schedules: by name.
        num_microbatches: of each step.
        num_rounds: steps that are measured.
        folder: for the profile, which is the same for all schedules.
        picture: where to draw one of the schedules; nowhere if empty.
        num_ms: of F, of I and of W of a device's share, where they are to be others.
    """
    torch.set_num_threads(1)
    world = join_world()
    share = SHARE if num_ms is None else LayerSeconds(*[num_ms / 1e3] * 3)
    job = Job(schedules, num_microbatches, num_rounds, share, folder, picture)
    return [measure(world, job, name) for name in schedules]


def measure(world: World, job: Job, name: str) -> dict[str, Any]:
    """Play some steps of one schedule on emulated devices."""
    per_device = SCHEDULES[name].stages_per_device
    # All schedules play one model, so that it is profiled once.
    layers_on = math.lcm(2, per_device)
    layers_per_stage = layers_on // per_device
    num_layers = layers_on * world.world_size
    batch = numbered_batch(job.num_microbatches, SAMPLES, CHANNELS)
    with sleeping_pipeline(
        _part(job.share, layers_on),
        num_layers,
        layers_per_stage,
        CHANNELS,
        example=batch,
        schedule=name,
        num_microbatches=job.num_microbatches,
        profile_dir=job.folder,
        world=world,
    ) as pipeline:
        lane = _own_lane(pipeline.plan.schedule, world.rank)
        rounds = train_rounds(
            world,
            pipeline,
            lambda: pipeline.step(batch),
            list(as_done(lane, layers_per_stage)),
            job.num_rounds,
        )
        if job.picture and name == PICTURED and pipeline.is_main:
            _draw(Path(job.picture), name, pipeline.predicted, rounds.timelines)
        row = _row(name, job, pipeline, rounds.timelines)
        return {**row, "in_order": rounds.in_order, "busy_cores": rounds.busy_cores}


def _part(share: LayerSeconds, num_layers: int) -> LayerSeconds:
    """One of a device's equal layers."""
    return LayerSeconds(
        share.forward_s / num_layers,
        share.input_grad_s / num_layers,
        share.weight_grad_s / num_layers,
    )


def _own_lane(schedule: Schedule, device: int) -> tuple[Any, ...]:
    (number,) = schedule.lanes_of(device)
    return schedule.lanes[number].ops


def given_s(schedule: Schedule, share: LayerSeconds) -> float:
    """The makespan if ops took what is given, and messages and updates nothing."""
    cost = StageCost(share.forward_s, share.input_grad_s, share.weight_grad_s)
    return simulate(schedule, Costs((cost,), is_device_share=True)).makespan_s


def _row(
    name: str,
    job: Job,
    pipeline: hocket.Pipeline,
    steps: list[Timeline],
) -> dict[str, Any]:
    predicted, schedule = pipeline.predicted, pipeline.plan.schedule
    measured_s = [step.makespan_s for step in steps]
    errors = sorted(predicted.makespan_s / second_s - 1 for second_s in measured_s)
    return {
        "is_emulated": True,
        "schedule": name,
        "num_devices": schedule.program.num_devices,
        "num_stages": schedule.program.num_stages,
        "num_microbatches": job.num_microbatches,
        "num_rounds": job.num_rounds,
        "given_ms": round(given_s(schedule, job.share) * 1e3, 4),
        "predicted_ms": round(predicted.makespan_s * 1e3, 4),
        "measured": spread(measured_s),
        "error": round(median(errors), 4),
        "errors": [round(error, 4) for error in errors],
        "bubble_predicted": round(predicted.bubble_fraction, 4),
        "bubble_measured": round(median(x.bubble_fraction for x in steps), 4),
        "sleep_over_given": round(_mean_over(schedule, steps, job.share), 4),
        "message_us": round(pipeline.plan.costs.link.latency_s * 1e6, 1),
        "handling_us": round(pipeline.plan.costs.handling.latency_s * 1e6, 1),
    }


def _mean_over(schedule: Schedule, steps: list[Timeline], share: LayerSeconds) -> float:
    """By which share ops took longer than they should have slept, in the mean."""
    sleeps = {
        Kind.FORWARD: share.forward_s,
        Kind.BACKWARD: share.input_grad_s + share.weight_grad_s,
        Kind.BACKWARD_INPUT: share.input_grad_s,
        Kind.BACKWARD_WEIGHT: share.weight_grad_s,
    }
    spans = [span for step in steps for span in step.spans if span.op.kind in sleeps]
    per_device = schedule.program.num_stages // schedule.program.num_devices
    due_s = fmean(sleeps[span.op.kind] for span in spans) / per_device
    return fmean(span.end_s - span.start_s for span in spans) / due_s - 1


def _draw(path: Path, name: str, predicted: Timeline, steps: list[Timeline]) -> None:
    """Predicted above what happened in the step of median length."""
    middle = sorted(steps, key=lambda step: step.makespan_s)[len(steps) // 2]
    num_devices = middle.schedule.program.num_devices
    picture = to_svg(
        [("simulated", predicted), ("emulated: ops sleep, messages are real", middle)],
        title=f"{name}, {num_devices} emulated devices",
        style=Style(show_memory=False),
    )
    path.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
