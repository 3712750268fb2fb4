"""Pairs of jobs on one accelerator: first that each is exact, then how fast.

    python -m bench.gpu.share [--size large|small] [--seconds 2.5] [--output FILE]

Every contestant runs in a process of its own, since the allocator is chosen when torch
is imported: each job alone, turns, free streams, strict waves, two processes, and
`auto` under a budget of the weights and 0.63 of both peaks. Behind the pairs, a job in
two waves beside its plain loop, and a pipeline with and without a fill. A contestant
that fails is a row with its error, and the others go on. Pairs for which no time is
left (`--limit`, 540 s) are left out, and named. Without a GPU it runs on the CPU, which
shows that the script works and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch

import hocket
from bench.gpu.machine import gpus
from bench.gpu.one_job import filled, in_waves
from bench.measure import environment, write_result
from bench.share.jobs import LARGE, SMALL, job_makers

RESULTS: Final = Path(__file__).parent / "results"
PAIRS: Final = (
    ("transformer", "resnet"),
    ("lstm", "lstm"),
    ("gan", "autoencoder"),
    ("perceptron", "transformer"),
    ("resnet", "resnet"),
    ("lstm", "gan"),
)
MODES: Final = ("turns", "free", "tick-tock", "auto")
SIZES: Final = {"large": LARGE, "small": SMALL}
NUM_ALONE: Final = 40
NUM_FILL_ROUNDS: Final = 6
NUM_COMPARED: Final = 14  # losses; auto has a mode after ten
MEMORY_SHARE: Final = 0.63  # of both peaks above the weights
TIMEOUT_S: Final = 120  # of one process; a busy CPU needs it
PAIR_S: Final = 100.0  # that a pair may take
LAST_S: Final = 90.0  # that the waves and the fill may take
MOST_ITERATIONS: Final = 2000
SHARED_ALLOCATOR: Final = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}


def main() -> None:
    """Run all pairs, and keep the results as JSON after each."""
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    default = "large" if has_gpu else "small"
    parser.add_argument("--size", choices=SIZES, default=default)
    parser.add_argument("--seconds", type=float, default=2.5 if has_gpu else 0.5)
    parser.add_argument("--limit", type=float, default=540.0)
    parser.add_argument("--pairs", type=int, default=len(PAIRS))
    parser.add_argument("--output", type=Path, default=RESULTS / "share.json")
    parser.add_argument("--one", help="what one process runs, as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(run_one(json.loads(arguments.one))))
        return
    end_s = perf_counter() + arguments.limit - LAST_S
    rows: list[Any] = []
    alone: dict[str, Any] = {}
    for pair in PAIRS[: arguments.pairs]:
        found: list[Any] = [{"pair": list(pair), "error": "no time was left"}]
        if perf_counter() + PAIR_S < end_s:
            found = measured(pair, alone, arguments.size, arguments.seconds)
        rows += _shown(found)
        _keep(arguments.output, rows)
    asked = {"waves": True, "size": arguments.size}
    waves = Contestant(asked, shares_memory=True).result()
    rows += _shown([waves] if "error" in waves else waves["rows"])
    _keep(arguments.output, rows)
    rows += _shown([_fill(NUM_FILL_ROUNDS if has_gpu else 2)])
    _keep(arguments.output, rows)
    if not all(row.get("exact", True) for row in rows):
        raise SystemExit("not exact, or failed: see above")


def _fill(num_rounds: int) -> dict[str, Any]:
    try:
        return filled(num_rounds)
    except Exception as error:  # the rows before stay
        return {"contestant": "fill", "error": str(error), "exact": False}


def _shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row in rows:
        print(row, flush=True)
    return rows


def _keep(path: Path, rows: Sequence[Any]) -> None:
    write_result(path, {"environment": environment() | gpus(), "rows": [*rows]})


def measured(
    pair: Sequence[str], alone: dict[str, Any], size: str, seconds: float
) -> list[dict[str, Any]]:
    """The rows of one pair; measures each job alone, if none has yet.

    Args:
        pair: the jobs.
        alone: what was found before, by job; gets what is found here.
        size: of the models.
        seconds: for so long the slower job trains, if it is not slowed.
    """
    for name in pair:
        if name not in alone:
            asked = {"jobs": [name], "mode": "turns", "iterations": NUM_ALONE}
            alone[name] = Contestant({**asked, "size": size}).result()
    failed = [alone[name] for name in pair if "error" in alone[name]]
    if failed:
        return [{"pair": list(pair), "contestant": "alone", **x} for x in failed]
    each = [alone[name]["jobs"][0] for name in pair]
    moving = [x["peak_bytes"] - x["static_bytes"] for x in each]
    static = sum(x["static_bytes"] for x in each)
    budget = int(static + max(MEMORY_SHARE * sum(moving), 1.05 * max(moving)))
    slower_s = max(x["shared_s"] for x in each)
    number = min(MOST_ITERATIONS, max(2 * NUM_COMPARED, int(seconds / slower_s)))
    asked = {"jobs": list(pair), "iterations": number, "size": size}
    rows = []
    for mode in MODES:
        own = {**asked, "mode": mode}
        if mode == "auto":
            own["memory_bytes"] = budget
        found = Contestant(own, shares_memory=mode != "turns").result()
        rows.append(_row(pair, mode, found, each))
    both = [Contestant({**asked, "jobs": [x], "mode": "turns"}) for x in pair]
    results = [one.result() for one in both]
    rows.append(_row(pair, "two processes", _together(results), each))
    return rows


def _row(
    pair: Sequence[str], name: str, found: Any, each: Sequence[Any]
) -> dict[str, Any]:
    """A row of a pair.

    A job alone has the mean time of its iterations, as it has beside another one.
    """
    row: dict[str, Any] = {"pair": list(pair), "contestant": name}
    if "error" in found:
        return {**row, **found}
    jobs = [*zip(each, found["jobs"], strict=True)]
    speeds = [own["shared_s"] / job["shared_s"] for own, job in jobs]
    static = sum(x["static_bytes"] for x in each)
    separate = sum(x["reserved_bytes"] for x in each)
    above = (found["reserved_bytes"] - static) / max(1, separate - static)
    return {
        **row,
        "mode": found["mode"],
        "why": found["why"],
        "seconds": round(found["seconds"], 1),
        "sum_of_speeds": round(sum(speeds), 3),
        "worst_slowdown": round(1 / min(speeds), 3),
        "counted_peak_bytes": found["counted_peak_bytes"],
        "reserved_bytes": found["reserved_bytes"],
        "separate_reserved_bytes": separate,
        "static_bytes": static,
        "above_static_over_separate": round(above, 3),
        "exact": all(own["losses"] == job["losses"] for own, job in jobs),
    }


def _together(results: Sequence[Any]) -> dict[str, Any]:
    """What two processes have found that ran at the same time."""
    for result in results:
        if "error" in result:
            return dict(result)
    return {
        "jobs": [result["jobs"][0] for result in results],
        "mode": "two processes",
        "why": "",
        "seconds": max(x["seconds"] for x in results),
        "counted_peak_bytes": sum(x["counted_peak_bytes"] for x in results),
        "reserved_bytes": sum(x["reserved_bytes"] for x in results),
    }


class Contestant:
    """A process that runs one contestant."""

    def __init__(
        self, asked: Mapping[str, Any], *, shares_memory: bool = False
    ) -> None:
        self.asked = asked
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu.share", "--one", json.dumps(asked)],
            env={
                **os.environ,
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
                **(SHARED_ALLOCATOR if shares_memory else {}),
            },
            stdout=subprocess.PIPE,
            text=True,
        )

    def result(self) -> Any:
        """What it printed last, when it has ended; or its error."""
        try:
            out, _ = self.process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            return {"error": f"took longer than {TIMEOUT_S} s", "exact": False}
        if code := self.process.returncode:
            return {"error": f"code {code}: see above", "exact": False}
        return json.loads(out.splitlines()[-1])


def run_one(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What each process does: one call of `hocket.share`, or one job in waves."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True)
    if asked.get("waves"):
        return {"rows": in_waves(SIZES[asked["size"]])}
    makers = job_makers(SIZES[asked["size"]])
    jobs = [
        hocket.Job(f"{name} {i}", makers[name]) for i, name in enumerate(asked["jobs"])
    ]
    begin_s = perf_counter()
    report = hocket.share(
        jobs,
        mode=asked["mode"],
        memory_bytes=asked.get("memory_bytes"),
        num_iterations=asked["iterations"],
    )
    report.check()
    has_gpu = torch.cuda.is_available()
    reserved = torch.cuda.max_memory_reserved() if has_gpu else int(report.peak_bytes)
    return {
        "mode": report.mode.value,
        "why": report.why,
        "seconds": perf_counter() - begin_s,
        "counted_peak_bytes": int(report.peak_bytes),
        "reserved_bytes": reserved,
        "jobs": [
            {
                "shared_s": job.shared_s,
                "static_bytes": int(job.static_bytes),
                "peak_bytes": int(job.peak_bytes),
                "reserved_bytes": reserved,
                "losses": job.losses[:NUM_COMPARED],
            }
            for job in report.jobs
        ],
    }


if __name__ == "__main__":
    main()
