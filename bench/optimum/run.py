"""How far each published order is from the best order of the same work.

    python -m bench.optimum.run

For p in 2..8 devices and m in p..4p microbatches, with equal times and with those of a
GPT measured here layer by layer, every schedule of the table is simulated beside the
bound that `hocket.search` proves for its program (the same stages on the same devices)
under the memory that the schedule itself takes. A distance of 0 is an optimum.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from torch.nn import functional

from bench.measure import environment, write_result
from bench.optimum.picture import distances_svg
from examples.zoo.text import NUM_BYTE_VALUES, Gpt
from hocket.core.costs import Costs, StageCost
from hocket.core.hardware import load_catalogue
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.errors import PlanError
from hocket.model.capture.capture import capture
from hocket.model.profile.measure import profile
from hocket.model.profile.work import measured_work
from hocket.planner.candidate import Candidate
from hocket.planner.cluster import Cluster
from hocket.planner.predict import Predictor
from hocket.planner.search.optimum import search
from hocket.planner.search.problem import bound_s
from hocket.planner.search.result import SearchResult, gap
from hocket.planner.work import ModelCosts
from hocket.recipes.models.make import Blocks
from hocket.run.stage.split.by_layers import ByLayers
from hocket.schedules import SCHEDULES, Shape

RESULTS: Final = Path(__file__).parent / "results"
TARGET: Final = {"schedule": "zb-auto", "median_gap": 0.03}
MEMORY: Final = 2**40  # of each device: the schedules' own peaks are the limits here
BLOCKS: Final = Blocks(width=128, num_blocks=32, num_heads=4, mlp_width=512)
WINDOW: Final = 64
SAMPLES: Final = 4  # in a microbatch

# What a transformer keeps of a layer, and what of it its weights' gradients need (Qi
# et al., arXiv:2401.10241, table 1, without attention scores): 34 and 32 parts; and
# such that stages that share a device evenly still hold whole numbers.
EQUAL: Final = Costs(
    (
        StageCost(
            forward_s=1.0,
            input_grad_s=1.0,
            weight_grad_s=1.0,
            activation_bytes=34 * 12,
            weight_grad_held_bytes=32 * 12,
        ),
    ),
    is_device_share=True,
)


@dataclass(slots=True)
class Bounds:
    """What was proved, once for each program and memory."""

    time_limit_s: float
    known: dict[tuple[Program, int, str], SearchResult] = field(default_factory=dict)

    def of(
        self, schedule: Schedule, costs: Costs, memory_bytes: int, times: str
    ) -> SearchResult:
        """The best order with no more memory, or how good one might be."""
        key = schedule.program, memory_bytes, times
        if key not in self.known:
            self.known[key] = search(
                schedule.program,
                costs,
                memory_bytes,
                time_limit_s=self.time_limit_s,
            )
        return self.known[key]


def main() -> None:
    """Measure every case, print a line for each, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[*range(2, 9)])
    parser.add_argument("--times", nargs="+", default=["equal", "measured"])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each search")
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    work = _measured() if "measured" in arguments.times else None
    bounds = Bounds(arguments.seconds)
    rows = []
    for times in arguments.times:
        for p in arguments.devices:
            for m in range(p, 4 * p + 1, p):
                for name, schedule, costs in _orders(p, m, work, times):
                    rows.append(_row(name, schedule, costs, times, bounds))
                    print(rows[-1], flush=True)
    write_result(
        arguments.output,
        {
            "environment": environment(),
            "target": TARGET,
            "seconds_per_search": arguments.seconds,
            "medians": _medians(rows),
            "rows": rows,
        },
    )
    picture = distances_svg(rows)
    arguments.output.with_suffix(".svg").write_text(picture, encoding="utf-8")


def _orders(
    p: int, m: int, work: ModelCosts | None, times: str
) -> Iterator[tuple[str, Schedule, Costs]]:
    """Every schedule that takes the numbers; those with a limit also at 1F1B's."""
    for name, entry in SCHEDULES.items():
        v = entry.stages_per_device
        costs = EQUAL if times == "equal" else _costs(work, name, p, m, v)
        given: dict[str, Any] = {"costs": costs, "memory_bytes": None}
        variants = {name: given}
        if "memory_bytes" in entry.options:
            peak = _peak_bytes(SCHEDULES["1f1b"].make(Shape(p, m)), costs)
            lean = {**given, "memory_bytes": peak}
            variants[f"{name}, with 1f1b's memory"] = lean
        for variant, offered in variants.items():
            options = {x: offered[x] for x in offered if x in entry.options}
            try:
                schedule = entry.make(Shape(p, m, v), **options)
            except PlanError:
                continue
            if _is_chain(schedule.program, p * v):
                yield variant, schedule, costs


def _is_chain(program: Program, num_stages: int) -> bool:
    """One net that is trained with its newest weights, cut into so many stages."""
    flows = tuple((stage, stage + 1) for stage in range(num_stages - 1))
    return program.flows == flows and all(
        stage.trainable and not stage.delay for stage in program.stages
    )


def _costs(work: ModelCosts | None, name: str, p: int, m: int, v: int) -> Costs:
    """Of the measured model, cut into as many stages."""
    assert work is not None
    link = load_catalogue().link("shared-memory")
    cluster = Cluster(p, MEMORY, link)
    return Predictor(work, cluster, m * SAMPLES).costs(Candidate(name, p, 1, v, m))


def _row(
    name: str, schedule: Schedule, costs: Costs, times: str, bounds: Bounds
) -> dict[str, Any]:
    timeline = simulate(schedule, costs)
    peak = _peak_bytes(schedule, costs)
    found = bounds.of(schedule, costs, peak, times)
    program = schedule.program
    return {
        "schedule": name,
        "times": times,
        "num_devices": program.num_devices,
        "num_stages": program.num_stages,
        "num_microbatches": program.num_microbatches_of(0),
        "makespan_s": timeline.makespan_s,
        "peak_bytes": peak,
        "bound_s": found.bound_s,
        "gap": round(gap(timeline.makespan_s, found.bound_s), 5),
        "best_known_s": found.makespan_s,
        "is_proved": found.is_optimal,
        "search_s": round(found.elapsed_s, 2),
        "any_memory_gap": round(gap(timeline.makespan_s, bound_s(program, costs)), 5),
    }


def _peak_bytes(schedule: Schedule, costs: Costs) -> int:
    timeline = simulate(schedule, costs)
    devices = range(schedule.program.num_devices)
    return round(max(map(timeline.peak_bytes, devices)))


def _medians(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    names = dict.fromkeys(row["schedule"] for row in rows)
    kinds = dict.fromkeys(row["times"] for row in rows)
    return {
        times: {
            name: round(
                median(
                    row["gap"]
                    for row in rows
                    if (row["schedule"], row["times"]) == (name, times)
                ),
                5,
            )
            for name in names
        }
        for times in kinds
    }


def _measured() -> ModelCosts:
    """A GPT's layers, as they take here: an embedding, equal blocks, a head."""
    model = Gpt(window_bytes=WINDOW, blocks=BLOCKS)
    batch = torch.randint(0, NUM_BYTE_VALUES, (SAMPLES, WINDOW))
    captured = capture(model, (batch,))
    of_one = profile(
        captured,
        captured.example.resized(SAMPLES).leaves,
        device=torch.device("cpu"),
        make_splitter=ByLayers,
        finish=lambda score_BTV: functional.cross_entropy(
            score_BTV.flatten(0, 1), batch.flatten()
        ),
    )
    return measured_work(captured, {SAMPLES: of_one}, {}, update_s_per_byte=0.0)


if __name__ == "__main__":
    main()
