"""WPipe's microbatches in blocks beside all of a step in one, on the simulator.

    python -m bench.wpipe.blocks

takes a second. Devices are equal, and a forward takes 1: what is compared are the most
microbatches that a device holds, and the time of a long run.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Final

from bench.measure import environment, write_result
from hocket.core.check import check
from hocket.core.costs import Costs
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.schedules import make_schedule

RESULTS: Final = Path(__file__).parent / "results" / "blocks.json"
SIZES: Final = ((2, 16), (2, 32), (4, 16), (4, 32), (8, 16), (8, 32))
MESSAGES_S: Final = (0.0, 0.05, 0.25, 0.5)
NUM_STEPS: Final = 12
NAMES: Final = ("wpipe", "wpipe-overlapped")


def rows() -> Iterator[dict[str, Any]]:
    """Return one row per schedule, size and message time."""
    for name, (p, m), message_s in product(NAMES, SIZES, MESSAGES_S):
        shape = {"num_devices": p, "num_microbatches": m, "num_steps": NUM_STEPS}
        blocks = make_schedule(name, **shape)
        one = make_schedule(name, **shape, num_blocks=1)
        two_bw = make_schedule("pipedream-2bw", **shape)
        found = {"blocks": blocks, "one block": one, "2bw": two_bw}
        yield {
            "schedule": name,
            "num_devices": p,
            "num_microbatches": m,
            "message_s": message_s,
            **{key: _simulated(s, message_s) for key, s in found.items()},
        }


def _simulated(schedule: Schedule, message_s: float) -> dict[str, float]:
    timeline = simulate(schedule, Costs.uniform(message_s=message_s))
    devices = range(schedule.program.num_devices)
    held = [timeline.peak_activations(device=device) for device in devices]
    return {
        "num_versions": sum(check(schedule).num_versions),
        "makespan_s": round(timeline.makespan_s, 6),
        "steady_bubble": round(timeline.steady_bubble_fraction, 6),
        "most_held": max(held),
        "held": sum(held),
    }


def main() -> None:
    """Simulate all, and keep it."""
    write_result(RESULTS, {"environment": environment(), "rows": list(rows())})


if __name__ == "__main__":
    main()
