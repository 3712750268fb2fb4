"""Emulated devices without a flush: what share of the time they idle, by formulas too.

    python -m bench.emulated.flush_free [--workers 4 8] [--schedules wpipe]

As in `run.py` each op sleeps a given time. Messages are on their way for a given time,
too (bench/emulated/delayed.py): so one can see what a schedule loses by it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

import hocket
from bench.emulated.delayed import delayed_messages
from bench.emulated.layers import LayerSeconds, as_done, numbered_batch
from bench.emulated.rounds import sleeping_pipeline, train_rounds
from bench.measure import environment, write_result
from hocket.core.costs import Costs, Link, StageCost
from hocket.core.op import Kind, Op
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.core.timelines.timeline import Timeline
from hocket.run.cluster.world import World, join_world
from hocket.schedules import SCHEDULES

RESULTS: Final = Path(__file__).parent / "results"
WORKERS: Final = (4, 8)
NAMES: Final = ("pipedream-2bw", "wpipe", "wpipe-overlapped")
DELAYS: Final = (0.0, 0.1, 0.25)  # of a message, in forwards of a device's share
CLIPPED_DELAY: Final = 0.1  # where gradients are clipped
TARGET: Final = 0.02  # of all the time, beside the formula
NUM_STEPS: Final = 7  # three of them while the pipeline is full, and measured
SAMPLES: Final = 4  # in a microbatch
CHANNELS: Final = 64
LAYERS_PER_DEVICE: Final = 2
# Of a device's whole share. A backward takes twice as long.
FORWARD_S: Final = 60e-3


@dataclass(frozen=True, slots=True)
class Job:
    """What the workers do with one schedule.

    Args:
        name: of the schedule.
        delay: of each message, in forwards.
        num_rounds: how often all steps are trained.
        forward_s: of a device's whole share.
        folder: for the profile, which is the same for all schedules.
        clips: whether each update needs the norm of its group's gradients.
    """

    name: str
    delay: float
    num_rounds: int
    forward_s: float
    folder: str
    clips: bool = False

    @property
    def share(self) -> StageCost:
        """What a device takes for one microbatch."""
        return StageCost(self.forward_s, self.forward_s, self.forward_s)

    @property
    def delay_s(self) -> float:
        """Of each message."""
        return self.delay * self.forward_s


def main() -> None:
    """Measure what was asked for, and keep it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--schedules", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--delays", type=float, nargs="+", default=DELAYS)
    parser.add_argument("--clips", type=int, nargs="+", default=(0, 1))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "flush_free.json")
    arguments = parser.parse_args()
    rows: list[Any] = []
    for num_workers, clips in product(arguments.workers, arguments.clips):
        with tempfile.TemporaryDirectory() as folder:
            results = hocket.launch(
                "bench.emulated.flush_free:worker",
                [
                    list(arguments.schedules),
                    [CLIPPED_DELAY] if clips else list(arguments.delays),
                    arguments.rounds,
                    folder,
                    FORWARD_S,
                    bool(clips),
                ],
                num_workers=num_workers,
                run_dir=Path(folder),
            )
        rows += results[0]
        for row in results[0]:
            print(row, flush=True)
    result = {"environment": environment(), "target": TARGET, "rows": rows}
    write_result(arguments.output, result)


def worker(
    names: list[str],
    delays: list[float],
    num_rounds: int,
    folder: str,
    forward_s: float = FORWARD_S,
    clips: bool = False,
) -> list[dict[str, Any]]:
    """What each process does: a row for each schedule and delay, the same on all.

    Args:
        names: of schedules.
        delays: of messages, in forwards.
        num_rounds: how often all steps are trained.
        folder: for the profile.
        forward_s: of a device's whole share.
        clips: whether each update needs the norm of its group's gradients.
    """
    torch.set_num_threads(1)
    world = join_world()
    return [
        measure(world, Job(name, delay, num_rounds, forward_s, folder, clips))
        for name in names
        for delay in delays
    ]


def measure(world: World, job: Job) -> dict[str, Any]:
    """Train some steps of one schedule on emulated devices, a few times."""
    m = least_microbatches(job.name, world.world_size)
    per_stage = LAYERS_PER_DEVICE // SCHEDULES[job.name].stages_per_device
    num_layers = LAYERS_PER_DEVICE * world.world_size
    layer_s = job.forward_s / LAYERS_PER_DEVICE
    batches = [
        numbered_batch(m, SAMPLES, CHANNELS, step * m) for step in range(NUM_STEPS)
    ]
    with (
        delayed_messages(job.delay_s),
        sleeping_pipeline(
            LayerSeconds(layer_s, 2 * layer_s, 0.0),
            num_layers,
            per_stage,
            CHANNELS,
            example=batches[0],
            schedule=job.name,
            num_microbatches=m,
            clip_norm=1.0 if job.clips else None,
            profile_dir=job.folder,
            world=world,
        ) as pipeline,
    ):
        order = pipeline.plan.schedule.with_num_steps(NUM_STEPS)
        rounds = train_rounds(
            world,
            pipeline,
            lambda: [*pipeline.train(batches)],
            list(as_done_in_steps(order, world.rank, per_stage)),
            job.num_rounds,
        )
        row = _row(job, pipeline, order, rounds.timelines)
        return {**row, "in_order": rounds.in_order, "busy_cores": rounds.busy_cores}


def least_microbatches(name: str, num_devices: int) -> int:
    """As few as the schedule takes: those that the papers have, and the formulas."""
    if name == "wpipe-overlapped":
        return max(num_devices, 2 * (num_devices - 1))
    return num_devices


def steady_idle(name: str, num_devices: int, job: Job) -> float:
    """The share of the time that a device idles while the pipeline is full.

    Of each `s`, a microbatch's forward and backward through one stage, a tight warm-up
    loses what two messages take, but for the last device. A longer one hides messages
    of up to a quarter of `F + B`.

    Source: section "Without a flush" of docs/explanation/flush-free.md.
    """
    if name == "wpipe-overlapped":
        assert job.delay_s <= 3 * job.forward_s / 4
        return 0.0
    slot_s = 3 * job.forward_s / SCHEDULES[name].stages_per_device
    lost_s = 2 * job.delay_s * (num_devices - 1) / num_devices
    return lost_s / (slot_s + lost_s)


def as_done_in_steps(
    order: Schedule, device: int, layers_per_stage: int
) -> Iterator[Op]:
    """What a device's layers do in all steps, whose microbatches are counted on.

    Args:
        order: of all steps.
        device: whose lane.
        layers_per_stage: of the model's cut. None sleeps in W: B is I.
    """
    (number,) = order.lanes_of(device)
    for op in order.lanes[number].ops:
        if op.kind in (Kind.FORWARD, Kind.BACKWARD) and op.microbatch is not None:
            first = op.step * order.program.num_microbatches_of(op.stage)
            kind = op.kind if op.kind is Kind.FORWARD else Kind.BACKWARD_INPUT
            counted = Op(kind, op.stage, first + op.microbatch)
            yield from as_done([counted], layers_per_stage)


def _row(
    job: Job, pipeline: hocket.Pipeline, order: Schedule, rounds: Sequence[Timeline]
) -> dict[str, Any]:
    program = order.program
    idle = sorted(x.steady_bubble_fraction for x in rounds)
    formula = steady_idle(job.name, program.num_devices, job)
    given = Costs((job.share,), is_device_share=True, link=Link(job.delay_s))
    return {
        "is_emulated": True,
        "schedule": job.name,
        "num_devices": program.num_devices,
        "num_microbatches": program.num_microbatches_of(0),
        "num_steps": program.num_steps,
        "num_rounds": len(rounds),
        "forward_ms": job.forward_s * 1e3,
        "delay": job.delay,
        "clips": job.clips,
        "formula": round(formula, 4),
        "simulated": round(simulate(order, given).steady_bubble_fraction, 4),
        "predicted": round(pipeline.predicted.steady_bubble_fraction, 4),
        "measured": round(median(idle), 4),
        "rounds": [round(share, 4) for share in idle],
    }


if __name__ == "__main__":
    main()
