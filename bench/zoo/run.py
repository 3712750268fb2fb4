"""Each architecture of the zoo on two workers, beside one plain process and DDP.

    python -m bench.zoo.run [--only bert unet] [--profiles 2] [--rounds 6]

Each profile belongs to pipelines of its own, which then train some rounds in turn with
the others: `1f1b`, and the order that `hocket.plan` found fastest. Predictions are
compared with the rounds that follow them. What one architecture cannot do, its row
says; the others go on.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

import hocket
from bench.in_turn import Order
from bench.measure import alternate, environment, write_result
from bench.zoo.architecture import NAMES, Architecture, architecture
from bench.zoo.contestants import (
    Contestant,
    data_parallel,
    model_of,
    pipeline_of,
    plain,
)
from bench.zoo.planned import fastest, planned
from bench.zoo.row import Forecast, Sample, print_row, summary
from hocket.core.simulator.memory import peak_parts
from hocket.errors import HocketError
from hocket.run.cluster.world import World, join_world

RESULTS: Final = Path(__file__).parent / "results"
SIMPLE: Final = Order("1f1b")
NUM_MAKESPANS: Final = 3  # steps whose ops are looked at, per profile


def main() -> None:
    """Measure what was asked for, and keep it as JSON after each architecture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--profiles", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6, help="for each profile")
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu.json")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in arguments.only:
        rows.append(measured(name, arguments.profiles, arguments.rounds))
        print_row(rows[-1])
        write_result(arguments.output, {"environment": environment(), "rows": rows})


def measured(name: str, num_profiles: int, num_rounds: int) -> dict[str, Any]:
    """One row, from two processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = hocket.launch(
                "bench.zoo.run:worker",
                [name, num_profiles, num_rounds, folder],
                num_workers=2,
                run_dir=Path(folder),
                timeout_s=120.0,
            )
        except HocketError as error:
            return {"architecture": name, "failed": str(error).splitlines()[0]}
    row: dict[str, Any] = results[0]
    return row


def worker(
    name: str, num_profiles: int, num_rounds: int, folder: str
) -> dict[str, Any]:
    """What each of the two processes does."""
    torch.set_num_threads(1)
    world = join_world()
    found = architecture(name)
    batch = found.batch()
    rivals, no_ddp = _rivals(found, batch, world)
    step_s, not_planned = planned(found, batch, world)
    orders = tuple(dict.fromkeys((SIMPLE, fastest(step_s))))
    samples = [
        sample
        for i in range(num_profiles)
        for sample in _bout(
            found, batch, world, rivals, orders, num_rounds, f"{folder}/{i}"
        )
    ]
    peaks = {
        label: world.gather_json(rival.peak_bytes) for label, rival in rivals.items()
    }
    return {
        "architecture": name,
        "num_parameters": sum(p.numel() for p in model_of(found).parameters()),
        "batch_size": found.batch_size,
        "num_microbatches": found.num_microbatches,
        "num_profiles": num_profiles,
        "num_rounds": num_rounds,
        "chosen": str(orders[-1]),
        "not_planned": not_planned,
        "no_ddp": no_ddp,
        "contestants": {
            label: summary(
                [sample for sample in samples if sample.name == label],
                found.batch_size,
                step_s.get(label),
                peaks.get(label),
            )
            for label in dict.fromkeys(sample.name for sample in samples)
        },
    }


def _rivals(
    found: Architecture, batch: Any, world: World
) -> tuple[dict[str, Contestant], str]:
    """Those that are not pipelines; and why DDP is not there, if it is not."""
    rivals = {"plain": plain(found, batch, world)}
    reason = ""
    try:
        rivals["ddp"] = data_parallel(found, batch, world)
    except (RuntimeError, TypeError, ValueError) as error:  # whatever torch refuses
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    reasons = [text for text in world.gather_json(reason, "DDP") if text]
    if reasons:
        rivals.pop("ddp", None)
        reason = str(reasons[0])
    return rivals, reason


def _bout(
    found: Architecture,
    batch: Any,
    world: World,
    rivals: Mapping[str, Contestant],
    orders: Sequence[Order],
    num_rounds: int,
    folder: str,
) -> list[Sample]:
    """A profile, pipelines that stand on it, and all contestants in turn."""
    made = {
        str(order): pipeline_of(found, batch, world, order, folder) for order in orders
    }
    steps = {label: rival.step for label, rival in rivals.items()}
    steps |= {label: contestant.step for label, (_, contestant) in made.items()}
    seconds = alternate(steps, world, num_rounds=num_rounds, num_warm=1, num_before=1)
    forecasts = {
        label: _forecast(pipeline, contestant, batch, world)
        for label, (pipeline, contestant) in made.items()
    }
    for pipeline, _ in reversed(made.values()):  # as signals were taken over
        pipeline.close()
    return [Sample(label, seconds[label], forecasts.get(label)) for label in steps]


def _forecast(
    pipeline: hocket.Pipeline, contestant: Contestant, batch: Any, world: World
) -> Forecast:
    measured = []
    for _ in range(NUM_MAKESPANS):
        pipeline.step(batch)
        measured.append(pipeline.measured())
    predicted = pipeline.predicted
    parts = peak_parts(predicted, pipeline.plan.costs)
    return Forecast(
        predicted.makespan_s,
        median(timeline.makespan_s for timeline in measured),
        predicted.bubble_fraction,
        median(timeline.bubble_fraction for timeline in measured),
        [part.total_bytes for part in parts],
        world.gather_json(contestant.peak_bytes),
    )


if __name__ == "__main__":
    main()
