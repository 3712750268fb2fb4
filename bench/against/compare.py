"""Step times of this checkout beside those of another one, in turn.

    git worktree add --detach ../before b319931
    python -m bench.against.compare ../before [--cases large small] [--rounds 8]

Two jobs of two workers each, one of each checkout, are alive at the same time and train
in turn, so that both meet the same machine. Stages are cut at the same places. Both are
started again several times: which memory pages and cores a process gets at its start
changes its times by more than the two checkouts differ.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.in_turn import environment, paired_ratio, spread
from bench.measure import write_result
from bench.models import CASES

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = Path(__file__).parent / "results"
SCHEDULES: Final = {"1f1b": 1, "zb-v": 2, "pipedream-2bw": 1, "wpipe": 2}
STEPS: Final = {"large": 1, "middle": 2, "small": 2, "resnet": 4}  # of one turn
NUM_WARM: Final = 2
LIMIT_S: Final = 180.0


@dataclass(frozen=True, slots=True)
class Job:
    """The two workers of one checkout.

    Args:
        folder: where they find their turns.
        process: their launcher.
    """

    folder: Path
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, checkout: Path, folder: Path, settings: dict[str, Any]) -> Job:
        """Start a checkout's job."""
        folder.mkdir()
        shutil.copy(Path(__file__).with_name("worker.py"), folder)
        path = os.pathsep.join(map(str, (checkout / "src", checkout, folder)))
        process = subprocess.Popen(
            [sys.executable, "worker.py", str(folder), json.dumps(settings)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
        )
        return cls(folder, process)

    def turn(self, number: int) -> float:
        """Let the job train once; seconds from the last start to the last end.

        Raises:
            RuntimeError: it ended, or did not answer in time.
        """
        self._write(number, "go")
        answers = [self.folder / f"answer-{number}-{rank}" for rank in range(2)]
        until_s = time.monotonic() + LIMIT_S
        while not all(answer.exists() for answer in answers):
            if self.process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"the job in {self.folder} gave no answer")
            time.sleep(0.002)
        spans = [json.loads(answer.read_text()) for answer in answers]
        return float(max(end for _, end in spans) - max(begin for begin, _ in spans))

    def end(self, number: int) -> None:
        """Let the workers leave."""
        self._write(number, "end")
        self.process.wait(LIMIT_S)

    def _write(self, number: int, text: str) -> None:
        unfinished = self.folder / "turn.new"
        unfinished.write_text(text)
        unfinished.rename(self.folder / f"turn-{number}")


def main() -> None:
    """Measure what was asked for, and keep it as JSON after each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    parser.add_argument("--starts", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=8, help="of each start")
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu.json")
    given = parser.parse_args()
    rows = read_rows(given.output)
    for case in given.cases:
        for schedule in given.schedules:
            other, rounds = given.other.resolve(), (given.starts, given.rounds)
            row = rows[case, schedule] = measure(other, case, schedule, *rounds)
            print(row, flush=True)
            result = {"environment": environment(), "rows": list(rows.values())}
            write_result(given.output, result)


def read_rows(output: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows measured before, by model and schedule."""
    if not output.exists():
        return {}
    rows = json.loads(output.read_text())["rows"]
    return {(row["model"], row["schedule"]): row for row in rows}


def measure(
    other: Path, case: str, schedule: str, num_starts: int, num_rounds: int
) -> dict[str, Any]:
    """One row: this checkout's time over the other's."""
    v = SCHEDULES[schedule]
    names = [name for name, _ in CASES[case].make().named_children()]
    num_stages = 2 * v
    settings = {
        "case": case,
        "schedule": schedule,
        "stages_per_device": None if v == 1 else v,
        "cut": [names[len(names) * i // num_stages] for i in range(1, num_stages)],
        "num_steps": STEPS[case],
    }
    starts = [in_turn(other, settings, num_rounds) for _ in range(num_starts)]
    own, others = (
        [seconds for start in starts for seconds in start[name]]
        for name in ("this", "other")
    )
    return {
        "model": case,
        "schedule": schedule,
        "num_steps": STEPS[case],
        "num_starts": num_starts,
        "this": spread(own),
        "other": spread(others),
        "ratio": paired_ratio(own, others),
        "ratio_of_starts": sorted(
            round(median(start["this"]) / median(start["other"]), 3) for start in starts
        ),
    }


def in_turn(
    other: Path, settings: dict[str, Any], num_rounds: int
) -> dict[str, list[float]]:
    """Start both checkouts' jobs and let them train in turn; seconds of each round."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = {
            "this": Job.start(ROOT, Path(folder, "this"), settings),
            "other": Job.start(other, Path(folder, "other"), settings),
        }
        found: dict[str, list[float]] = {name: [] for name in jobs}
        try:
            for number in range(NUM_WARM + num_rounds):
                for name in list(jobs) if number % 2 else list(jobs)[::-1]:
                    found[name].append(jobs[name].turn(number))
            for job in jobs.values():
                job.end(NUM_WARM + num_rounds)
        finally:
            for job in jobs.values():
                job.process.kill()
    return {name: seconds[NUM_WARM:] for name, seconds in found.items()}


if __name__ == "__main__":
    main()
