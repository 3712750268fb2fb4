"""Measured peaks of live activations beside the formulas of the schedules' files.

    python -m bench.activations.run [--workers 2 4] [--schedules 1f1b zb-v]

A model of equal blocks whose activations are known to the byte (stage.py), two blocks
on each device. Measured is what torch's allocator had given out at the end of an op, at
most, beyond what was there before the step.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F

import hocket
from bench.activations.after_ops import OpBytes, bytes_of_ops
from bench.activations.stage import BlockBytes, Blocks, batch
from bench.measure import environment, write_result
from bench.runnable import runnable
from hocket.core.costs import Costs
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.run.cluster.world import World, join_world
from hocket.schedules import SCHEDULES, Shape, make_schedule

RESULTS: Final = Path(__file__).parent / "results"
WORKERS: Final = (2, 4)
TARGET: Final = 0.05
BLOCKS_PER_DEVICE: Final = 2


def main() -> None:
    """Measure what was asked for, and keep it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES)
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu.json")
    arguments = parser.parse_args()
    rows: list[Any] = []
    for num_workers in arguments.workers:
        num_microbatches = 3 * num_workers
        names = runnable(num_workers, num_microbatches)
        wanted = [x for x in names if x in (arguments.schedules or names)]
        with tempfile.TemporaryDirectory() as folder:
            results = hocket.launch(
                "bench.activations.run:worker",
                [wanted, num_microbatches, folder],
                num_workers=num_workers,
                run_dir=Path(folder),
            )
        rows += results[0]
        for row in results[0]:
            print(row, flush=True)
    result = {"environment": environment(), "target": TARGET, "rows": rows}
    write_result(arguments.output, result)


def worker(
    schedules: list[str], num_microbatches: int, folder: str
) -> list[dict[str, Any]]:
    """What each process does: rows of all schedules, the same on all.

    Args:
        schedules: by name.
        num_microbatches: of each step.
        folder: for the profiles.
    """
    torch.set_num_threads(1)
    world = join_world()
    return [
        measure(world, name, num_microbatches, folder, waits=waits)
        for name in schedules
        for waits in (False, True)
    ]


def measure(
    world: World, name: str, num_microbatches: int, folder: str, *, waits: bool
) -> dict[str, Any]:
    """One schedule with one model: every device's peak beside its formula."""
    v = SCHEDULES[name].stages_per_device
    shape = Shape(world.world_size, num_microbatches, v)
    num_blocks = BLOCKS_PER_DEVICE * world.world_size
    per_stage = num_blocks // shape.num_stages
    given = batch(num_microbatches)
    # Not by name: the pipeline would make zb-auto for the times that it measures.
    order = make_schedule(
        name, num_devices=shape.num_devices, num_microbatches=num_microbatches
    )
    torch.manual_seed(0)
    with hocket.Pipeline(
        Blocks(num_blocks, waits=waits),
        F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        example=given,
        schedule=order,
        num_microbatches=num_microbatches,
        cut=[f"blocks.{i}" for i in range(per_stage, num_blocks, per_stage)],
        profile_dir=folder,
        world=world,
    ) as pipeline:
        pipeline.step(given)
        own = bytes_of_ops(pipeline, given)
        known = BlockBytes.of(waits=waits)
        seen = pipeline.plan.costs.stages[0]
        devices = [
            asdict(device)
            for device in _devices(
                name,
                shape,
                pipeline.plan.schedule,
                known,
                [OpBytes(**part) for part in world.gather_json(asdict(own))],
            )
        ]
    return {
        "schedule": name,
        "num_devices": shape.num_devices,
        "num_stages": shape.num_stages,
        "num_microbatches": num_microbatches,
        "waits": waits,
        "unit_bytes": BLOCKS_PER_DEVICE * known.kept,
        "held_unit_bytes": BLOCKS_PER_DEVICE * known.held,
        "profiled_unit_bytes": v * seen.activation_bytes,
        "profiled_held_unit_bytes": v * seen.weight_grad_held_bytes,
        "worst": max((x["error"] for x in devices), key=abs),
        "devices": devices,
    }


@dataclass(frozen=True, slots=True)
class Device:
    """One device's peak.

    Args:
        formula_units: of the schedule's file, in microbatches of a device's share; what
            W holds after I is not in it.
        due_bytes: those, and what W holds: the largest sum over the lane.
        measured_bytes: at most after an op.
        inside_bytes: at most while one runs.
        error: measured over due, minus one.
    """

    formula_units: float
    due_bytes: int
    measured_bytes: int
    inside_bytes: int
    error: float


def _devices(
    name: str,
    shape: Shape,
    schedule: Schedule,
    known: BlockBytes,
    measured: list[OpBytes],
) -> list[Device]:
    cost = known.cost(BLOCKS_PER_DEVICE)
    timeline = simulate(schedule, Costs((cost,), is_device_share=True))
    found = []
    for device, own in enumerate(measured):
        units = SCHEDULES[name].peak_activations(shape, device)
        due = round(timeline.peak_bytes(device))
        assert known.held or due == units * cost.activation_bytes, (name, device)
        peak = max(own.after)
        found.append(
            Device(units, due, peak, max(own.inside), round(peak / due - 1.0, 4))
        )
    return found


if __name__ == "__main__":
    main()
