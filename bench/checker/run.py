"""How long `check` takes for a million ops, and its memory.

    python -m bench.checker.run

Each case runs in a process of its own, which makes the schedule, checks it several
times and reports every time, and the most memory that the whole process ever held
(interpreter and schedule included). Everything that `check` proves is proved.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Final

from bench.own_process import peak_gib, run_cases
from hocket.core.check import check
from hocket.core.op import Kind
from hocket.core.schedule import Lane, Schedule
from hocket.schedules import make_schedule

RESULTS: Final = Path(__file__).parent / "results"
TARGET_GIB: Final = 2.0


@dataclass(frozen=True, slots=True)
class Case:
    """A schedule, and the most seconds that checking it may take, if any."""

    make: Callable[[], Schedule]
    target_s: float | None = None


def with_side_lanes(schedule: Schedule) -> Schedule:
    """Move the weight gradients of each device to a second lane."""
    lanes: list[Lane] = []
    for lane in schedule.lanes:
        of_kind: tuple[list[Any], list[Any]] = ([], [])
        for op in lane.ops:
            of_kind[op.kind is Kind.BACKWARD_WEIGHT].append(op)
        lanes += [replace(lane, stream=i, ops=tuple(o)) for i, o in enumerate(of_kind)]
    return replace(schedule, lanes=tuple(lanes))


def _zero_bubble(num_microbatches: int) -> Schedule:
    schedule = make_schedule(
        "zb-h1", num_devices=256, num_microbatches=num_microbatches
    )
    return with_side_lanes(schedule)


CASES: Final = {
    "1f1b": Case(
        partial(make_schedule, "1f1b", num_devices=256, num_microbatches=2048), 5.0
    ),
    "interleaved-zb": Case(
        partial(
            make_schedule,
            "interleaved-zb",
            num_devices=64,
            num_microbatches=128,
            stages_per_device=4,
        ),
        1.0,
    ),
    "wpipe": Case(
        partial(
            make_schedule, "wpipe", num_devices=64, num_microbatches=256, num_steps=16
        )
    ),
    "zb-h1, W in lanes of their own": Case(partial(_zero_bubble, 1365)),
}


def measure(case: Case, num_rounds: int) -> dict[str, Any]:
    """Run one case in this process."""
    begin_s = perf_counter()
    schedule = case.make()
    make_s = perf_counter() - begin_s
    wall_s, cpu_s = [], []
    for _ in range(num_rounds):
        gc.collect()
        begin_s, begin_cpu_s = perf_counter(), process_time()
        proof = check(schedule)
        wall_s.append(round(perf_counter() - begin_s, 3))
        cpu_s.append(round(process_time() - begin_cpu_s, 3))
    return {
        "num_ops": schedule.num_ops,
        "num_lanes": len(schedule.lanes),
        "make_schedule_s": round(make_s, 3),
        "check_s": wall_s,
        "check_cpu_s": cpu_s,
        "best_s": min(wall_s),
        "target_s": case.target_s,
        "peak_gib": peak_gib(),
        "num_buffers": proof.num_buffers,
    }


if __name__ == "__main__":
    run_cases(
        "bench.checker.run",
        CASES,
        measure,
        "checked",
        {"peak_gib": TARGET_GIB},
        RESULTS / "million_ops.json",
    )
