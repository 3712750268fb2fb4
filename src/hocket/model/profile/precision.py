"""Repeats a measurement, and says when that is often enough.

One round to warm up, and five that count; what lies outside of the span does not:

    for span in timed_rounds(seconds, device, 5):
        prepare()
        with span:
            run()
    median(seconds)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from math import inf, sqrt
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Final, TypeAlias

import torch

_LEAST: Final = 10  # measurements
_EVERY: Final = 5  # check again after every 5
_SHARE: Final = 0.02
_NOTCH: Final = 1.57


def rounds(
    least: int,
    most: float = inf,
    *,
    num_warm: int = 1,
    most_s: float = 0.0,
    is_enough: Callable[[], bool] = lambda: False,
) -> Iterator[bool]:
    """Yield once for each round: whether it counts, and is no warm-up.

    Args:
        least: the smallest number of rounds that count.
        most: the largest.
        num_warm: the rounds before them.
        most_s: no round begins after so many seconds, but for the least.
        is_enough: asked after each round that counts from the least on.
    """
    begin_s = perf_counter()
    for _ in range(num_warm):
        yield False
    for num in count(1):
        yield True
        is_late = num >= most or perf_counter() - begin_s >= most_s
        if num >= least and (is_late or is_enough()):
            return


def timed_rounds(
    seconds: list[float],
    device: torch.device,
    least: int,
    num_warm: int = 1,
    most_s: float = 0.0,
) -> Iterator[AbstractContextManager[None]]:
    """Yield for each round the context of what is timed.

    Args:
        seconds: gets the seconds of each round that counts.
        device: whose work is waited for.
        least: the rounds that count; there are more until `most_s` have passed.
        num_warm: the rounds before them.
        most_s: as for `rounds`.
    """
    clock = clock_of(device)
    for counts in rounds(least, num_warm=num_warm, most_s=most_s):
        yield timed(clock, seconds if counts else [])


def is_precise(columns: Sequence[Sequence[float]]) -> bool:
    """Return whether the medians are known within 2 %, all together.

    Half the 95 % confidence interval of a median is 1.57 quartile ranges by the root of
    the number of measurements.

    Args:
        columns: the seconds of several things, each measured several times.

    Source: McGill, Tukey and Larsen, "Variations of Box Plots", 1978.
    """
    num = min(map(len, columns))
    if num < _LEAST or num % _EVERY:
        return False
    half_s = sum(_NOTCH / sqrt(len(x)) * quartile_range(x) for x in columns)
    return half_s <= _SHARE * sum(map(median, columns))


def core_wait_s() -> float:
    """Return how long this thread has waited for a core that others had.

    0 where the system does not count it, as Linux does in schedstat.
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def quartile_range(seconds: Sequence[float]) -> float:
    """Return the difference of the upper and the lower quartile."""
    low, _, high = quantiles(seconds, n=4)
    return high - low


Clock: TypeAlias = Callable[[], float]


def clock_of(device: torch.device) -> Clock:
    """Return a clock: seconds once all work queued on the device is done.

    An accelerator's clock waits for the current stream alone: another one may wait for
    a message that is sent only after this worker goes on.
    """
    if device.type == "cpu":
        return perf_counter

    def after_all_work() -> float:
        torch.accelerator.current_stream(device).synchronize()
        return perf_counter()

    return after_all_work


@contextmanager
def timed(clock: Clock, seconds: list[float]) -> Iterator[None]:
    """Append the block's seconds."""
    begin = clock()
    yield
    seconds.append(clock() - begin)
