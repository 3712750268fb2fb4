"""Launches the workers of a script that checks weights first and then times steps."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import hocket
from bench.gpu.machine import gpus
from bench.measure import environment, write_result

RESULTS: Final = Path(__file__).parent / "results"
TOLERANCE: Final = 1e-10  # of weights in float64, relative to the largest
NUM_ROUNDS: Final = 10
STEPS_IN_TURN: Final = 5
_ROWS: Final = ("exactness", "speed")
SIZES: Final = {"full": (1024, 64, 256), "small": (32, 8, 8)}  # width, samples, tokens


def run(name: str, description: str | None, alone: str = "") -> None:
    """Launch the workers of `bench.gpu.NAME`, keep what rank 0 returns, and print it.

    Args:
        name: of a module with a function `worker(backend, size)`, whose result has the
            lists "exactness" (rows that hold or not) and "speed".
        description: for `--help`.
        alone: a function like `worker`, which one worker runs after the others; its
            rows come behind theirs.

    Raises:
        SystemExit: a row of "exactness" does not hold.
    """
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--size", choices=SIZES, default="full" if has_gpu else "small")
    parser.add_argument("--output", type=Path, default=RESULTS / f"{name}.json")
    arguments = parser.parse_args()
    num_workers = 2
    backend = "nccl" if torch.cuda.device_count() >= num_workers else "gloo"
    found: dict[str, Any] = {}
    for function, count in (("worker", num_workers), (alone, 1)):
        if not function:
            continue
        with tempfile.TemporaryDirectory() as folder:
            results = hocket.launch(
                f"bench.gpu.{name}:{function}",
                [backend, arguments.size],
                num_workers=count,
                run_dir=Path(folder),
                timeout_s=120.0,
            )
        rows = {key: found.get(key, []) + results[0][key] for key in _ROWS}
        found = {**results[0], **rows}
    where = environment() | gpus() | {"backend": backend}
    write_result(arguments.output, {"environment": where, **found})
    for row in [*found["exactness"], *found["speed"]]:
        print(row)
    if not all(row["holds"] for row in found["exactness"]):
        raise SystemExit("not exact: see above")


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, in parts of the largest expected number."""
    off = (found.cpu() - expected.cpu()).abs().max() / expected.abs().max().cpu()
    return float(off)
