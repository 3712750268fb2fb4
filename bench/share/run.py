"""What turns cost, how well memory is forecast, and how well modes are predicted.

    python -m bench.share.run [--parts turns forecast merged] [--rounds 7]

One process on a CPU, two jobs with one thread each.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Thread
from time import perf_counter, process_time
from typing import Any, Final

import torch

import hocket
from bench.measure import environment, paired_ratio, spread, write_result
from bench.share.jobs import (
    MIDDLE,
    MadeJob,
    Make,
    PlainLoop,
    job_makers,
    sleeping,
)
from hocket.model.profile.allocations import allocations
from hocket.sharing.policy import Mode
from hocket.sharing.simulate import SimulatedJob, predict

RESULTS: Final = Path(__file__).parent / "results" / "cpu.json"
PARTS: Final = ("turns", "gate", "forecast", "merged")
Stamp = tuple[float, float]  # seconds of the clock, and of this process
CPU: Final = torch.device("cpu")
NUM_STRETCH: Final = 12  # iterations of each job
NUM_FIRST: Final = 8  # steps that do not count: of each job two are watched
STRETCHES_PER_ROUND: Final = 8
NUM_EMPTY: Final = 400
MIB: Final = 2**20
# Seconds of forward and backward, and bytes, of two emulated jobs.
PAIRS: Final = {
    "equal": ((0.02, 0.04, 64 * MIB), (0.02, 0.04, 64 * MIB)),
    "1 to 2": ((0.02, 0.04, 64 * MIB), (0.01, 0.02, 64 * MIB)),
    "2 to 3": ((0.02, 0.04, 64 * MIB), (0.03, 0.06, 32 * MIB)),
    "long forward": ((0.04, 0.02, 64 * MIB), (0.02, 0.04, 64 * MIB)),
}


def main() -> None:
    """Measure what was asked for, and keep it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kept = kept_rows(arguments.output)
    for part in arguments.parts:
        kept[part] = []
        for row in PART[part](arguments.rounds):
            print(row, flush=True)
            kept[part].append({"part": part, **row})
            rows = [row for part in PARTS for row in kept.get(part, [])]
            write_result(arguments.output, {"environment": environment(), "rows": rows})


def kept_rows(path: Path) -> dict[str, list[Any]]:
    """Return the rows that are there already, by part: those not measured stay."""
    found: dict[str, list[Any]] = {}
    for row in json.loads(path.read_text())["rows"] if path.exists() else ():
        found.setdefault(row["part"], []).append(row)
    return found


def turns(num_rounds: int) -> Iterator[dict[str, Any]]:
    """CPU time of a step of two jobs in turns, over that of one plain loop.

    A round is a short stretch of each, one after the other, with the same models: what
    differs from round to round (the machine), or from model to model (where its memory
    lies), is in both. Each round has a ratio of its own.
    """
    makers = job_makers(MIDDLE)
    for name in ("gan", "autoencoder"):
        pair = [MadeJob(makers[name]) for _ in range(2)]
        found: dict[str, list[Stamp]] = {"plain": [], "turns": []}
        for i in range(-1, STRETCHES_PER_ROUND * num_rounds):
            for contestant in ("plain", "turns") if i % 2 else ("turns", "plain"):
                gc.collect()
                run = _plain if contestant == "plain" else _in_turns
                step = run([job.remake for job in pair])
                found[contestant] += [step] if i >= 0 else []  # the first one warms up
        wall, cpu = (
            {kind: [x[i] for x in own] for kind, own in found.items()} for i in (0, 1)
        )
        yield {
            "jobs": [name, name],
            "plain": spread(cpu["plain"]),
            "turns": spread(cpu["turns"]),
            "cpu_turns_over_plain": paired_ratio(cpu["turns"], cpu["plain"]),
            "turns_over_plain": paired_ratio(wall["turns"], wall["plain"]),
        }


def gate(num_rounds: int) -> Iterator[dict[str, Any]]:
    """What an iteration in turns costs that does nothing at all."""

    def make(job: hocket.JobContext) -> tuple[Any, Any]:
        def step(batch: int) -> None:
            with job.forward(), job.backward():
                pass

        return step, range(NUM_EMPTY)

    found = [_in_turns([make, make], NUM_EMPTY) for _ in range(num_rounds)]
    yield {
        "gate_us": round(median(wall for wall, _ in found) * 1e6, 1),
        "gate_cpu_us": round(median(cpu for _, cpu in found) * 1e6, 1),
    }


def _stamped(make: Make, stamps: list[Stamp]) -> Make:
    """The same job; records the time of day and of this process at each step."""

    def stamped(job: hocket.JobContext) -> tuple[Any, Any]:
        step, batches = make(job)

        def timed(batch: Any) -> Any:
            stamps.append((perf_counter(), process_time()))
            return step(batch)

        return timed, batches

    return stamped


def _median_step(stamps: list[Stamp]) -> Stamp:
    """The medians of what passed between two steps, without the first ones."""
    steps = list(pairwise(stamps[NUM_FIRST:]))
    return median(b[0] - a[0] for a, b in steps), median(b[1] - a[1] for a, b in steps)


def _plain(makers: list[Make]) -> Stamp:
    """One iteration of each job, one after the other, in one thread.

    Not in this one: its memory is another part of the heap than that of all others.
    """
    stamps: list[Stamp] = []
    makers = [_stamped(make, stamps) for make in makers]

    def loop() -> None:
        made = [make(PlainLoop(CPU)) for make in makers]
        loops = [(step, iter(batches)) for step, batches in made]
        for _ in range(NUM_STRETCH):
            for step, batches in loops:
                step(next(batches))

    thread = Thread(target=loop)
    thread.start()
    thread.join()
    return _median_step(stamps)


def _in_turns(makers: list[Make], num_iterations: int = NUM_STRETCH) -> Stamp:
    """The same, in turns."""
    stamps: list[Stamp] = []
    makers = [_stamped(make, stamps) for make in makers]
    jobs = [hocket.Job(str(i), make) for i, make in enumerate(makers)]
    report = hocket.share(
        jobs, mode="turns", num_iterations=num_iterations, device="cpu"
    )
    report.check()
    return _median_step(stamps)


def forecast(num_rounds: int) -> Iterator[dict[str, Any]]:
    """The forecast peak beside that of a plain loop, and durations beside the next."""
    del num_rounds
    for name, make in job_makers(MIDDLE).items():
        report = hocket.share(
            [hocket.Job(name, make)], mode="turns", num_iterations=20, device="cpu"
        )
        report.check()
        job = report[name]
        assert job.forecast is not None
        with allocations(CPU) as log:
            step, batches = make(PlainLoop(CPU))
            own = iter(batches)
            for _ in range(2):
                step(next(own))
            with log.span():
                step(next(own))
        measured = log.peaks[0]
        ends = [x.end_s - x.start_s for x in job.iterations[4:]]
        errors = [abs(b - a) / b for a, b in pairwise(ends)]
        yield {
            "model": name,
            "forecast_bytes": int(job.forecast.curve.peak),
            "measured_bytes": measured,
            "error": round(job.forecast.curve.peak / measured - 1, 4),
            "error_of_seconds": round(median(errors), 4),
        }


def merged(num_rounds: int) -> Iterator[dict[str, Any]]:
    """The predicted sum of speeds beside the measured one, on emulated lanes."""
    for pair, parts in PAIRS.items():
        jobs = [
            hocket.Job(name, sleeping(*part))
            for name, part in zip("ab", parts, strict=True)
        ]
        budget = 96 * MIB
        for mode in (Mode.TURNS, Mode.LAG, Mode.BUDGET, Mode.TICK_TOCK, Mode.FREE):
            found, predicted = [], []
            for _ in range(max(1, num_rounds // 2)):
                report = hocket.share(
                    jobs,
                    mode=mode.value,
                    memory_bytes=budget,
                    num_iterations=34,
                    device="cpu",
                )
                report.check()
                found.append(report.total_speed)
                known = [_as_simulated(job) for job in report.jobs]
                predicted.append(predict(mode, known, budget).total_speed)
            yield {
                "pair": pair,
                "mode": mode.value,
                "predicted": round(median(predicted), 3),
                "measured": round(median(found), 3),
                "error": round(median(predicted) / median(found) - 1, 4),
                "peak_over_budget": round(report.peak_bytes / budget, 3),
            }


def _as_simulated(job: hocket.JobReport) -> SimulatedJob:
    """A job as it is alone."""
    assert job.forecast is not None
    scale = job.solo_s / job.forecast.seconds
    alone = job.forecast.retimed(
        job.forecast.forward_s * scale, job.forecast.backward_s * scale
    )
    return SimulatedJob(job.name, alone, 1, static_bytes=job.static_bytes)


PART: Final = {"turns": turns, "gate": gate, "forecast": forecast, "merged": merged}


if __name__ == "__main__":
    main()
