"""Cases that each run in a process of their own, so that peak memory is the case's."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import environment, write_result


def run_cases(
    module: str,
    cases: Mapping[str, Any],
    measure: Callable[[Any, int], dict[str, Any]],
    verb: str,
    target: Mapping[str, float],
    output: Path,
) -> None:
    """Measure every case, print a line for each, and keep the results as JSON.

    With `--case NAME` on the command line, only this one, in this process.

    Args:
        module: the caller's module, which the processes run.
        cases: the cases by name.
        measure: returns the numbers of a case and so many rounds; `num_ops`,
            `make_schedule_s`, `best_s` and `peak_gib` are printed.
        verb: what is measured, in the past tense.
        target: what is aimed at, kept with the results.
        output: the JSON file.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", choices=cases, help="only this one, in this process")
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(cases[arguments.case], arguments.rounds)))
        return
    results = {}
    for name in cases:
        command = [sys.executable, "-m", module, "--case", name]
        done = subprocess.run(
            [*command, "--rounds", str(arguments.rounds)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        results[name] = result = json.loads(done.stdout)
        print(
            f"{name:32}  {result['num_ops']:,} ops: made in "
            f"{result['make_schedule_s']:.1f} s, {verb} in {result['best_s']:.2f} s "
            f"(best of {arguments.rounds}), peak {result['peak_gib']:.2f} GiB"
        )
    write_result(
        output,
        {
            "environment": {**environment(), "numpy": np.__version__},
            "target": target,
            "cases": results,
        },
    )


def peak_gib() -> float:
    """Return the most memory that this process ever held, in GiB."""
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak_kib / 2**20, 3)
