"""Checks that run one by one: what one raises is in its row, and the next one runs."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """What the checks of a part run with.

    Args:
        device: the GPU, or the CPU where there is none.
        quick: whether sizes are as small as possible: to test the checks themselves.
        folder: for files beside the rows.
    """

    device: torch.device
    quick: bool
    folder: Path

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def size(self, full: int, quick: int) -> int:
        """One of two sizes; a CPU always has the quick one."""
        return full if self.on_gpu and not self.quick else quick


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
