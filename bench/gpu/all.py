"""Measures hocket on a GPU in ten minutes, in parts that fail one by one.

    python -m bench.gpu.all [--seconds 540] [--continue-from FILE] [--output FILE]

Each part is a process with a timeout of its own, so that a failure costs one row. What
was found so far is in the output file after each; `--continue-from` begins with what is
missing or failed there. First what needs no quiet GPU, several parts at a time: what is
exact, while Inductor fills its cache; then whole runs. Then timings, one at a time, in
the order of the table, which is printed last. A part for which too few seconds are left
is listed as not measured. Without a GPU all runs on the CPU, small, which shows that
the scripts work and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from bench.gpu.part_process import Part, PartProcess
from bench.gpu.parts import EXACT, STARTED, TIMED, WHILE_EXACT
from bench.gpu.table import LINES, Line, kept, printed
from bench.measure import environment, write_result

RESULTS: Final = Path(__file__).parent / "results"
WHEELS: Final = Path(".whl")
INSTALL_TIMEOUT_S: Final = 60
EXACT_S: Final = 90.0  # that the exact parts may take, all together
STARTED_S: Final = 75.0  # and the whole runs
LAST_S: Final = 5.0  # for the last process to end, and the table


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts, in order, and what the table makes of them.

    Args:
        together: groups of parts, each with the seconds that it may take; the parts of
            a group run several at a time.
        timed: run one at a time, behind all groups.
        lines: of the table.
    """

    together: Mapping[str, tuple[Sequence[Part], float]]
    timed: Sequence[Part]
    lines: Sequence[Line]


PLAN: Final = Plan(
    {"exact": (WHILE_EXACT + EXACT, EXACT_S), "started": (STARTED, STARTED_S)},
    TIMED,
    LINES,
)


def main(plan: Plan = PLAN) -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--continue-from", type=Path, help="a file of an earlier run")
    parser.add_argument("--output", type=Path, default=RESULTS / "latest.json")
    parser.add_argument("--groups", default="exact,started,timed", help="some of them")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes")
    parser.add_argument("--slow", type=float, default=1.0, help="times each timeout")
    parser.add_argument(
        "--at-once", type=int, default=max(2, (os.cpu_count() or 2) // 2)
    )
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="installed first")
    arguments = parser.parse_args()
    end_s = time.monotonic() + arguments.seconds - LAST_S
    card = card_here()
    where = environment() | {"card": card, "cuda": torch.version.cuda}
    earlier = read(arguments.continue_from)
    with TemporaryDirectory() as site:
        wheels = install(arguments.wheels, Path(site))
        run = Run(
            arguments.output,
            {
                "environment": where,
                "wheels": wheels,
                "parts": kept(earlier, plan.lines, card),
            },
            end_s,
            arguments.slow,
            arguments.quick,
        )
        groups = arguments.groups.split(",")
        for name, (parts, seconds) in plan.together.items():
            if name in groups:
                run.together(parts, seconds, arguments.at_once)
        if "timed" in groups:
            run.one_by_one(plan.timed)
    run.finish(plan.lines)


@dataclass(frozen=True, slots=True)
class Run:
    """What runs parts and keeps what they found.

    Args:
        path: of the result.
        result: what is kept there; "parts" are by name.
        end_s: when all must have ended, in the time of `time.monotonic`.
        slow: factor of all times.
        quick: whether sizes are the smallest.
    """

    path: Path
    result: dict[str, Any]
    end_s: float
    slow: float = 1.0
    quick: bool = False
    asked: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.asked.update(
            folder=str(self.path.parent), result=str(self.path), quick=self.quick
        )
        write_result(self.path, self.result)

    def together(self, parts: Sequence[Part], seconds: float, num: int) -> None:
        """Run parts, several at a time, for so many seconds at most."""
        until_s = min(self.end_s, time.monotonic() + seconds * self.slow)

        def ran(part: Part) -> dict[str, Any]:
            left_s, needs_s = until_s - time.monotonic(), part.needs_s * self.slow
            if left_s < needs_s:
                return _not_measured(left_s, needs_s)
            timeout_s = min(left_s, part.timeout_s * self.slow)
            return PartProcess(part, self.asked).go(timeout_s)

        with ThreadPoolExecutor(num) as pool:
            futures = {pool.submit(ran, part): part for part in self._missing(parts)}
            for future in as_completed(futures):
                self._keep(futures[future], future.result())

    def one_by_one(self, parts: Sequence[Part]) -> None:
        """Run parts in order; each one's Python is started while the last measures."""
        waiting: PartProcess | None = None
        missing = self._missing(parts)
        for part, after in zip(missing, [*missing[1:], None], strict=True):
            left_s, needs_s = self.end_s - time.monotonic(), part.needs_s * self.slow
            if left_s < needs_s:
                self._keep(part, _not_measured(left_s, needs_s))
                if waiting:
                    waiting.drop()
                waiting = None
                continue
            process = waiting or PartProcess(part, self.asked)
            waiting = PartProcess(after, self.asked) if after else None
            self._keep(part, process.go(min(left_s, part.timeout_s * self.slow)))

    def finish(self, lines: Sequence[Line]) -> None:
        """Keep the table, and print it.

        Raises:
            SystemExit: a part failed.
        """
        parts = self.result["parts"]
        rows = [line.row(parts) for line in lines]
        self.result["table"] = rows
        write_result(self.path, self.result)
        print(printed(rows))
        left_out = [name for name, part in parts.items() if "not measured" in part]
        if left_out:
            print(f"not measured, for no time was left: {'; '.join(left_out)}")
        failed = [name for name, part in parts.items() if "error" in part]
        if failed:
            raise SystemExit(f"not as it should be: {'; '.join(failed)}: {self.path}")

    def _missing(self, parts: Sequence[Part]) -> list[Part]:
        return [part for part in parts if part.name not in self.result["parts"]]

    def _keep(self, part: Part, record: dict[str, Any]) -> None:
        where = self.result["environment"]
        record |= {key: where[key] for key in ("date", "card", "torch", "cuda")}
        self.result["parts"][part.name] = record
        write_result(self.path, self.result)
        if "not measured" not in record:
            said = record.get("error", "ended")
            print(f"{record['seconds']:6.1f} s  {part.name}: {said}", flush=True)


def _not_measured(left_s: float, needs_s: float) -> dict[str, Any]:
    why = f"{max(0.0, left_s):.0f} s are left, and it needs {needs_s:.0f} s"
    return {"holds": False, "not measured": why, "rows": {}}


def read(path: Path | None) -> dict[str, Any]:
    """The parts of an earlier run; none without a file."""
    found: Mapping[str, Any] = json.loads(path.read_text()) if path else {"parts": {}}
    return dict(found["parts"])


def card_here() -> str:
    """The name of the first GPU, by its driver; "CPU" where there is none."""
    if not torch.cuda.is_available():
        return "CPU"
    ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "GPU"
    return done.stdout.splitlines()[0].strip() if done.stdout else "GPU"


def install(wheels: Path, site: Path) -> dict[str, Any]:
    """Install carried wheels for the parts, if there are any."""
    files = [str(path) for path in sorted(wheels.glob("*.whl"))]
    if not files:
        return {"installed": [], "holds": True}
    command = [*(sys.executable, "-m", "pip", "install", "--quiet", "--no-index")]
    command += ["--no-deps", "--no-compile", "--target", str(site), *files]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        return {"installed": [], "error": str(error), "holds": False}
    if done.returncode:
        return {"installed": [], "error": done.stderr, "holds": False}
    paths = [str(site), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return {"installed": [Path(file).name for file in files], "holds": True}


if __name__ == "__main__":
    main()
