"""Pairs of jobs on one accelerator: first that each is exact, then how fast.

Every contestant is a part of `bench.gpu.all`, and so a process of its own, since the
allocator is chosen when torch is imported: each job alone, and of each pair turns, free
streams, strict waves, `auto` under a budget of the weights and 0.63 of both peaks, and
two processes. Those of a pair read what its jobs took alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter
from typing import Any, Final

import torch

import hocket
from bench.gpu.checked import Checks, Row, Setting, exactly
from bench.gpu.part_process import Part, end, start_python
from bench.share.jobs import LARGE, SMALL, job_makers

PAIRS: Final = (("lstm", "lstm"), ("transformer", "resnet"), ("gan", "autoencoder"))
MODES: Final = ("turns", "free", "tick-tock", "auto")
CONTESTANTS: Final = (*MODES, "two processes")
NUM_ALONE: Final = 40
NUM_COMPARED: Final = 14  # losses; auto has a mode after ten
MEMORY_SHARE: Final = 0.63  # of both peaks above the weights
TWO_PROCESSES_S: Final = 60.0
MOST_ITERATIONS: Final = 2000
SHARED_ALLOCATOR: Final = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
_CUBLAS: Final = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
_MODULE: Final = "bench.gpu.share"


def alone(name: str, setting: Setting) -> Row:
    """One job, in no one's company."""
    return shared([name], setting, "turns", NUM_ALONE)


def pair(names: Sequence[str], contestant: str, setting: Setting) -> Row:
    """Both jobs, beside what each took alone."""
    each = [setting.earlier[f"{name}, alone"]["jobs"][0] for name in names]
    number, budget = _iterations_and_budget(each, setting)
    if contestant == "two processes":
        found = _together([_in_a_process(x, number, setting) for x in names])
    else:
        memory = budget if contestant == "auto" else None
        found = shared(names, setting, contestant, number, memory)
    return _row(contestant, found, each)


def exactness(setting: Setting) -> Row:
    """Two small jobs side by side have the losses that they have alone."""
    names = PAIRS[0]
    each = [shared([x], setting, "turns", NUM_COMPARED)["jobs"][0] for x in names]
    rows = {
        mode: _row(mode, shared(names, setting, mode, NUM_COMPARED), each)["holds"]
        for mode in MODES
    }
    return {"exact": rows, "holds": all(rows.values())}


def _iterations_and_budget(each: Sequence[Row], setting: Setting) -> tuple[int, int]:
    """As many iterations as fill some seconds, and the bytes that `auto` may take."""
    moving = [x["peak_bytes"] - x["static_bytes"] for x in each]
    static = sum(x["static_bytes"] for x in each)
    budget = int(static + max(MEMORY_SHARE * sum(moving), 1.05 * max(moving)))
    slower_s = max(x["shared_s"] for x in each)
    seconds = 2.5 if setting.is_full else 0.05
    return min(MOST_ITERATIONS, max(2 * NUM_COMPARED, int(seconds / slower_s))), budget


def _row(name: str, found: Row, each: Sequence[Row]) -> Row:
    """A row of a pair.

    A job alone has the mean time of its iterations, as it has beside another one.
    """
    jobs = [*zip(each, found["jobs"], strict=True)]
    speeds = [own["shared_s"] / job["shared_s"] for own, job in jobs]
    static = sum(x["static_bytes"] for x in each)
    separate = sum(x["reserved_bytes"] for x in each)
    above = (found["reserved_bytes"] - static) / max(1, separate - static)
    return {
        "contestant": name,
        "mode": found["mode"],
        "why": found["why"],
        "seconds_shared": round(found["seconds_shared"], 1),
        "sum_of_speeds": round(sum(speeds), 3),
        "worst_slowdown": round(1 / min(speeds), 3),
        "counted_peak_bytes": found["counted_peak_bytes"],
        "reserved_bytes": found["reserved_bytes"],
        "separate_reserved_bytes": separate,
        "static_bytes": static,
        "above_static_over_separate": round(above, 3),
        "holds": all(own["losses"] == job["losses"] for own, job in jobs),
    }


def _together(results: Sequence[Any]) -> Row:
    """What two processes find that run at the same time."""
    found = [result() for result in results]
    return {
        "jobs": [one["jobs"][0] for one in found],
        "mode": "two processes",
        "why": "",
        "seconds_shared": max(x["seconds_shared"] for x in found),
        "counted_peak_bytes": sum(x["counted_peak_bytes"] for x in found),
        "reserved_bytes": sum(x["reserved_bytes"] for x in found),
    }


def _in_a_process(name: str, iterations: int, setting: Setting) -> Any:
    """Start a job in a process; what waits for it, and returns what it found."""
    place = TemporaryDirectory()
    found, output = Path(place.name) / "found", Path(place.name) / "output"
    asked = [name, iterations, str(setting.device), setting.quick, str(found)]
    program = f"import {_MODULE}; {_MODULE}.run_one(*{asked!r})"
    process = start_python(["-c", program], output)
    end_s = monotonic() + TWO_PROCESSES_S

    def result() -> Any:
        with place:
            if end(process, end_s) != 0:
                raise RuntimeError(f"{name}: {output.read_text()[-2000:]}")
            return json.loads(found.read_text())

    return result


def run_one(name: str, iterations: int, device: str, quick: bool, found: str) -> None:
    """What each of two processes does."""
    setting = Setting(torch.device(device), quick, Path(found).parent)
    row = shared([name], setting, "turns", iterations)
    Path(found).write_text(json.dumps(row))


def shared(
    names: Sequence[str],
    setting: Setting,
    mode: str,
    iterations: int,
    memory_bytes: int | None = None,
) -> Row:
    """One call of `hocket.share`."""
    exactly()
    torch.use_deterministic_algorithms(True)
    makers = job_makers(LARGE if setting.is_full else SMALL)
    jobs = [hocket.Job(f"{name} {i}", makers[name]) for i, name in enumerate(names)]
    begin_s = perf_counter()
    report = hocket.share(
        jobs, mode=mode, memory_bytes=memory_bytes, num_iterations=iterations
    )
    report.check()
    peak_bytes = int(report.peak_bytes)
    reserved = torch.cuda.max_memory_reserved() if setting.on_gpu else peak_bytes
    return {
        "mode": report.mode.value,
        "why": report.why,
        "seconds_shared": perf_counter() - begin_s,
        "counted_peak_bytes": peak_bytes,
        "reserved_bytes": reserved,
        "jobs": [
            {
                "shared_s": job.shared_s,
                "static_bytes": int(job.static_bytes),
                "peak_bytes": int(job.peak_bytes),
                "reserved_bytes": reserved,
                "losses": list(job.losses[:NUM_COMPARED]),
            }
            for job in report.jobs
        ],
    }


CHECKS: Final[Checks] = {
    "share, exact": exactness,
    **{
        name: check
        for names in PAIRS
        for name, check in (
            *((f"{x}, alone", partial(alone, x)) for x in names),
            *(
                (f"{'+'.join(names)}, {x}", partial(pair, names, x))
                for x in CONTESTANTS
            ),
        )
    },
}


def _part(name: str) -> Part:
    """A part of one check, with the memory that it needs."""
    own = name.endswith((", turns", ", alone", ", two processes"))
    variables = _CUBLAS if own else _CUBLAS | SHARED_ALLOCATOR
    return Part(name, _MODULE, name, variables=variables)


EXACT, *TIMED = map(_part, CHECKS)
