"""How long the simulator takes for a million ops on 256 devices, and its memory.

    python -m bench.simulator.run

Each case runs in a process of its own, which makes the schedule, simulates it several
times and reports every time, and the most memory that the whole process ever held
(interpreter, schedule and timeline included). Nothing is left out of the simulation:
messages with latency and bandwidth, and bytes over time of every device.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Final

from bench.own_process import peak_gib, run_cases
from hocket.core.costs import Costs, Link, StageCost
from hocket.core.simulate import simulate
from hocket.schedules import make_schedule

RESULTS: Final = Path(__file__).parent / "results"
NUM_DEVICES: Final = 256
TARGET_S: Final = 6.0
TARGET_GIB: Final = 2.0


@dataclass(frozen=True, slots=True)
class Case:
    """A schedule of a million ops, and the link that its messages take."""

    schedule: str
    num_microbatches: int
    link: Link


# One network card for all 256 devices needs the general clock, with its event queue.
CASES: Final = {
    "1f1b": Case("1f1b", 1953, Link(1e-5, 1e10)),
    "interleaved-1f1b": Case("interleaved-1f1b", 1024, Link(1e-5, 1e10)),
    "1f1b on one shared link": Case("1f1b", 1953, Link(1e-5, 1e13, "card")),
}

SHARE: Final = StageCost(
    forward_s=1e-3,
    input_grad_s=1e-3,
    weight_grad_s=1e-3,
    update_s=1e-3,
    output_bytes=10**6,
    input_grad_bytes=10**6,
    activation_bytes=10**7,
    weight_grad_held_bytes=10**6,
    weight_bytes=10**8,
    gradient_bytes=10**8,
    optimizer_bytes=2 * 10**8,
)


def measure(case: Case, num_rounds: int) -> dict[str, Any]:
    """Run one case in this process."""
    begin_s = perf_counter()
    schedule = make_schedule(
        case.schedule, num_devices=NUM_DEVICES, num_microbatches=case.num_microbatches
    )
    make_s = perf_counter() - begin_s
    costs = Costs((SHARE,), is_device_share=True, link=case.link)
    wall_s, cpu_s = [], []
    for _ in range(num_rounds):
        gc.collect()
        begin_s, begin_cpu_s = perf_counter(), process_time()
        timeline = simulate(schedule, costs)
        wall_s.append(round(perf_counter() - begin_s, 3))
        cpu_s.append(round(process_time() - begin_cpu_s, 3))
        makespan_s = timeline.makespan_s
        del timeline
    return {
        "num_ops": schedule.num_ops,
        "num_stages": schedule.program.num_stages,
        "make_schedule_s": round(make_s, 3),
        "simulate_s": wall_s,
        "simulate_cpu_s": cpu_s,
        "best_s": min(wall_s),
        "peak_gib": peak_gib(),
        "simulated_makespan_s": makespan_s,
    }


if __name__ == "__main__":
    run_cases(
        "bench.simulator.run",
        CASES,
        measure,
        "simulated",
        {"simulate_s": TARGET_S, "peak_gib": TARGET_GIB},
        RESULTS / "million_ops.json",
    )
