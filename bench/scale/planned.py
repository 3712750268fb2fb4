"""How long `hocket check`, `simulate` and `plan` take for 1,024 devices: 8 x 16 x 8.

    python -m bench.scale.planned

Each command runs in a process of its own, with its imports: pipelines of 8 devices in
16 replicas, each stage held by 8 devices together. `plan` knows no shards yet: it
predicts every layout of 1,024 devices, or, with `--layout 8x16x8`, one of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

from bench.measure import environment, write_result

RESULTS: Final = Path(__file__).parent / "results"
SIZES: Final = ("-d", "8", "-m", "64", "--replicas", "16", "--shards", "8")
MANY: Final = ("--devices", "1024", "--nodes", "128", "--hardware", "a100-80g")
PLAN: Final = ("plan", "bert-48", *MANY, "--batch-size", "8192")
# The command, how often, and the seconds that are aimed at.
CASES: Final[tuple[tuple[tuple[str, ...], int, float], ...]] = (
    (("check", "1f1b", *SIZES), 5, 10.0),
    (("check", "interleaved-1f1b", *SIZES, "--stages-per-device", "4"), 5, 10.0),
    (("simulate", "1f1b", *SIZES), 5, 10.0),
    (("simulate", "interleaved-1f1b", *SIZES, "--stages-per-device", "4"), 5, 10.0),
    ((*PLAN, "--layout", "8x16x8"), 1, 10.0),
    (PLAN, 1, 10.0),
)


def timed(command: tuple[str, ...]) -> tuple[float, float]:
    """Return the seconds of a command, and those of CPU time."""
    begin_s, before = perf_counter(), os.times()
    run = [sys.executable, "-m", "hocket", *command]
    subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    user_s = after.children_user - before.children_user
    system_s = after.children_system - before.children_system
    return perf_counter() - begin_s, user_s + system_s


def main() -> None:
    """Time every command, print, and keep it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS / "planned.json")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for command, num_rounds, target_s in CASES:
        seconds, cpu_s = zip(*(timed(command) for _ in range(num_rounds)), strict=True)
        rows.append(
            {
                "command": f"hocket {' '.join(command)}",
                "num_rounds": num_rounds,
                "median_s": round(median(seconds), 2),
                "median_cpu_s": round(median(cpu_s), 2),
                "target_s": target_s,
            }
        )
        print(rows[-1], flush=True)
    write_result(arguments.output, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
