"""Forecasts of jobs that a fake clock plays."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from hocket.core.timelines.memory import MemoryCurve
from hocket.sharing.forecast import Forecast
from hocket.sharing.simulate import SimulatedJob


def ramp(peak: float, *, forward_s: float = 1.0, num: int = 20) -> Forecast:
    """Memory that grows through forward, and shrinks through a backward twice as long.

    The curve of the seed's models: linear, in steps that are never below the line.
    """
    up = [forward_s * i / num for i in range(num)]
    down = [forward_s * (1 + 2 * (i + 1) / num) for i in range(num)]
    step = peak / num
    levels = np.cumsum([step] * num + [-step] * num)
    curve = MemoryCurve(np.array([*up, *down]), levels)
    return Forecast(forward_s, 2 * forward_s, curve)


def any_forecast(rng: random.Random, most: int = 6) -> Forecast:
    """Random memory: grows in forward, shrinks in backward, in some uneven steps."""
    num = rng.randint(1, most)
    forward_s, backward_s = rng.uniform(0.2, 2.0), rng.uniform(0.2, 4.0)
    sizes = [rng.uniform(0.1, 3.0) for _ in range(num)]
    up = [rng.uniform(0.0, forward_s) for _ in sizes]
    down = [forward_s + rng.uniform(0.0, backward_s) for _ in sizes]
    return Forecast.of_changes(
        forward_s, backward_s, [*up, *down], [*sizes, *(-x for x in sizes)]
    )


def needed(jobs: Sequence[SimulatedJob]) -> float:
    """The least budget: what turns need."""
    peak = max(job.actual.curve.peak for job in jobs)
    return sum(job.static_bytes for job in jobs) + peak
