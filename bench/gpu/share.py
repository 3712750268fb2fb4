"""Pairs of jobs on one accelerator: first that each is exact, then how fast.

    python -m bench.gpu.share [--size large|small] [--seconds 4] [--output FILE]

Every contestant runs in a process of its own, since the allocator is chosen when torch
is imported: each job alone, turns, free streams, strict waves, two processes, and
`auto` under a budget of the weights and 0.63 of both peaks. Behind the pairs, a job in
two waves beside its plain loop, and a pipeline with and without a fill. Without a GPU
it runs on the CPU, which shows that the script works and nothing else. Takes under ten
minutes.
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
NUM_ALONE: Final = 14
NUM_FILL_ROUNDS: Final = 6
NUM_COMPARED: Final = 14  # losses; auto has a mode after ten
MEMORY_SHARE: Final = 0.63  # of both peaks above the weights
TIMEOUT_S: Final = 300
MOST_ITERATIONS: Final = 2000
SHARED_ALLOCATOR: Final = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}


def main() -> None:
    """Run all pairs, and keep the results as JSON after each."""
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    default = "large" if has_gpu else "small"
    parser.add_argument("--size", choices=SIZES, default=default)
    parser.add_argument("--seconds", type=float, default=4.0 if has_gpu else 0.5)
    parser.add_argument("--pairs", type=int, default=len(PAIRS))
    parser.add_argument("--output", type=Path, default=RESULTS / "share.json")
    parser.add_argument("--one", help="what one process runs, as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(run_one(json.loads(arguments.one))))
        return
    rows: list[Any] = []
    alone: dict[str, Any] = {}
    for pair in PAIRS[: arguments.pairs]:
        for name in pair:
            if name not in alone:
                asked = {"jobs": [name], "mode": "turns", "iterations": NUM_ALONE}
                alone[name] = Contestant({**asked, "size": arguments.size}).result()
        rows += measured(pair, alone, arguments.size, arguments.seconds)
        _keep(arguments.output, rows)
    asked = {"waves": True, "size": arguments.size}
    waves = Contestant(asked, shares_memory=True).result()["rows"]
    fill = filled(NUM_FILL_ROUNDS if has_gpu else 2)
    for row in [*waves, fill]:
        print(row, flush=True)
        rows.append(row)
    _keep(arguments.output, rows)
    if not all(row["exact"] for row in rows):
        raise SystemExit("not exact: see above")


def _keep(path: Path, rows: Sequence[Any]) -> None:
    write_result(path, {"environment": environment() | gpus(), "rows": [*rows]})


def measured(
    pair: Sequence[str], alone: Mapping[str, Any], size: str, seconds: float
) -> list[dict[str, Any]]:
    """The rows of one pair."""
    each = [alone[name]["jobs"][0] for name in pair]
    moving = [x["peak_bytes"] - x["static_bytes"] for x in each]
    static = sum(x["static_bytes"] for x in each)
    budget = int(static + max(MEMORY_SHARE * sum(moving), 1.05 * max(moving)))
    slower_s = max(x["solo_s"] for x in each)
    number = min(MOST_ITERATIONS, max(NUM_COMPARED, int(seconds / slower_s)))
    rows = []
    for mode in MODES:
        asked = {"jobs": list(pair), "mode": mode, "iterations": number, "size": size}
        if mode == "auto":
            asked["memory_bytes"] = budget
        found = Contestant(asked, shares_memory=mode != "turns").result()
        rows.append(_row(pair, mode, found, each))
    rows.append(_two_processes(pair, each, number, size))
    for row in rows:
        print(row, flush=True)
    return rows


def _row(
    pair: Sequence[str], name: str, found: Any, each: Sequence[Any]
) -> dict[str, Any]:
    speeds = [
        own["solo_s"] / job["shared_s"]
        for own, job in zip(each, found["jobs"], strict=True)
    ]
    pairs = zip(found["jobs"], each, strict=True)
    return {
        "pair": list(pair),
        "contestant": name,
        "mode": found["mode"],
        "why": found["why"],
        "sum_of_speeds": round(sum(speeds), 3),
        "worst_slowdown": round(1 / min(speeds), 3),
        "counted_peak_bytes": found["counted_peak_bytes"],
        "reserved_bytes": found["reserved_bytes"],
        "separate_reserved_bytes": sum(x["reserved_bytes"] for x in each),
        "exact": all(a["losses"] == b["losses"] for a, b in pairs),
    }


def _two_processes(
    pair: Sequence[str], each: Sequence[Any], number: int, size: str
) -> dict[str, Any]:
    """Both jobs at the same time, in a process each."""
    runs = [
        Contestant(
            {"jobs": [name], "mode": "turns", "iterations": number, "size": size}
        )
        for name in pair
    ]
    results = [run.result() for run in runs]
    jobs = [result["jobs"][0] for result in results]
    found = {
        "jobs": jobs,
        "mode": "two processes",
        "why": "",
        "counted_peak_bytes": sum(x["counted_peak_bytes"] for x in results),
        "reserved_bytes": sum(x["reserved_bytes"] for x in results),
    }
    return _row(pair, "two processes", found, each)


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
        """What it printed last, when it has ended."""
        out, _ = self.process.communicate(timeout=TIMEOUT_S)
        if self.process.returncode:
            raise SystemExit(f"failed: {self.asked}\n{out}")
        return json.loads(out.splitlines()[-1])


def run_one(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What each process does: one call of `hocket.share`, or one job in waves."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
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
                "solo_s": job.solo_s,
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
