"""Checks that run one by one: what one raises is in its row, and the next one runs."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

TOLERANCE: Final = 1e-10  # of weights in float64, relative to the largest
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """What the checks of a part run with.

    Args:
        device: the GPU, or the CPU where there is none.
        quick: whether sizes are as small as possible: to test the checks themselves.
        folder: for files beside the rows.
        earlier: the only rows of parts that were measured before, by the part's name.
    """

    device: torch.device
    quick: bool
    folder: Path
    earlier: Mapping[str, Row] = field(default_factory=dict, compare=False)

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def size(self, full: int, quick: int) -> int:
        """One of two sizes; a CPU always has the quick one."""
        return full if self.is_full else quick

    @property
    def is_full(self) -> bool:
        """Whether sizes are those of a GPU."""
        return self.on_gpu and not self.quick


Check = Callable[[Setting], Row]
Checks = Mapping[str, Check]
NEEDS_A_GPU: Row = {"skipped": "needs a GPU"}


def by_name(*checks: Check) -> Checks:
    """Checks by the names of their functions."""
    return {check.__name__: check for check in checks}


def run_check(name: str, check: Callable[[], Row]) -> Row:
    """The row of one check: what it returns or raises, and how long it took.

    `holds` is whether it raised nothing and found what it should.
    """
    begin_s = time.perf_counter()
    try:
        row = {"holds": True, **check()}
    except Exception:
        row = {"holds": False, "error": traceback.format_exc()}
    seconds = round(time.perf_counter() - begin_s, 3)
    return {"check": name, **row, "seconds": seconds}


def here() -> torch.device:
    """The GPU, or the CPU where there is none."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def exactly() -> None:
    """Let the GPU compute in float32 what is in float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, in parts of the largest expected number."""
    off = (found.cpu() - expected.cpu()).abs().max() / expected.abs().max().cpu()
    return float(off)


def synchronize(device: torch.device) -> None:
    """Wait for the GPU; a CPU is done when the host is."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of some work, to the end of what it launched."""
    synchronize(device)
    begin_s = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - begin_s


def on_two_workers(entry: str) -> Row:
    """The rows of a function on two workers, which share a GPU or have one each.

    Args:
        entry: a function of a backend, as "module:function", which returns rows.
    """
    import hocket

    num_workers = 2
    backend = "nccl" if torch.cuda.device_count() >= num_workers else "gloo"
    with TemporaryDirectory() as folder:
        found = hocket.launch(
            entry,
            [backend],
            num_workers=num_workers,
            run_dir=Path(folder),
            timeout_s=60.0,
        )
    rows = found[0]
    return {"rows": rows, "holds": all(row["holds"] for row in rows)}
