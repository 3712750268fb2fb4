"""Medians and spread of things measured in turn, on all workers at once.

round 0   a  b  c       every contestant once
round 1   c  b  a       and back, so that no one always follows the same one
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any, Final

import torch
import torch.distributed as dist

from hocket.run.cluster.world import World

_CPU_INFO: Final = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Order:
    """What a pipeline plays.

    Args:
        schedule: its name.
        stages_per_device: of the model.
    """

    schedule: str
    stages_per_device: int = 1

    def __str__(self) -> str:
        """As tables have it."""
        many = self.stages_per_device
        return self.schedule if many == 1 else f"{self.schedule} x {many}"


def alternate(
    steps: Mapping[str, Callable[[], object]],
    world: World,
    *,
    num_rounds: int,
    num_warm: int,
    num_before: int = 0,
) -> dict[str, list[float]]:
    """Seconds of each contestant's step in each round, one after the other.

    A round runs every contestant once, in turn; the order is reversed in every other
    round. A step lasts from the last worker's start to the last worker's end.

    Args:
        steps: by name; each runs one whole step on this worker.
        world: all workers, on one host's clock.
        num_rounds: that count.
        num_warm: rounds before them.
        num_before: steps of the same contestant before each that counts: in training,
            a step finds in the caches what the step before it left there.
    """
    names = list(steps)
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for i in range(num_warm + num_rounds):
        for name in names if i % 2 else names[::-1]:
            for _ in range(num_before):
                steps[name]()
            if world.world_size > 1:
                dist.barrier()
            begin = perf_counter()
            steps[name]()
            end = perf_counter()
            if i >= num_warm:
                spans[name].append((begin, end))
    everyone: list[Any] = world.gather_json(
        {name: [list(span) for span in spans[name]] for name in names}
    )
    return {
        name: [
            max(part[name][i][1] for part in everyone)
            - max(part[name][i][0] for part in everyone)
            for i in range(num_rounds)
        ]
        for name in names
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median and quartiles, in milliseconds."""
    low, _, high = quantiles(seconds, n=4)
    return {
        "median_ms": round(median(seconds) * 1e3, 4),
        "quartile_1_ms": round(low * 1e3, 4),
        "quartile_3_ms": round(high * 1e3, 4),
    }


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> dict[str, float]:
    """The ratio of medians, and the quartiles of the rounds' own ratios."""
    low, middle, high = quantiles([x / y for x, y in zip(a, b, strict=True)], n=4)
    return {
        "of_medians": round(median(a) / median(b), 4),
        "median_of_rounds": round(middle, 4),
        "quartile_1": round(low, 4),
        "quartile_3": round(high, 4),
    }


def environment() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": _processor(),
        "num_cores": os.cpu_count(),
        "threads_per_worker": torch.get_num_threads(),
    }


def _processor() -> str:
    lines = _CPU_INFO.read_text("utf-8").splitlines() if _CPU_INFO.exists() else []
    for line in lines:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
