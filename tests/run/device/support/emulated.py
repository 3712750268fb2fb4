"""An emulated device: ops sleep for a given time instead of computing.

All else is a CPU device's: lanes, events, errors. On two cores eight such devices keep
the times that they are given, as sleeping takes no core.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from hocket.run.device.cpu import CpuDevice
from hocket.run.device.device import Work
from hocket.run.device.sanitize import Sanitizer

OpSeconds: TypeAlias = Callable[[str], float | None]


def emulated_device(
    op_seconds: OpSeconds,
    num_lanes: int = 1,
    *,
    budget_bytes: int,
    timeout_s: float,
    sanitizer: Sanitizer | None = None,
) -> CpuDevice:
    """Make a device whose ops sleep.

    Args:
        op_seconds: returns the seconds that the op of a label sleeps; its work is not
            called. None for an op that does its work, such as a message.
        num_lanes: the number of lanes; each beyond the first is a thread.
        budget_bytes: the bytes that tensors may take.
        timeout_s: after which a wait of one lane for another ends with an error.
        sanitizer: records events, to find races.
    """
    return CpuDevice(
        num_lanes,
        budget_bytes=budget_bytes,
        timeout_s=timeout_s,
        run_op=partial(_sleep_or_work, op_seconds),
        sanitizer=sanitizer,
    )


def sleep_until(deadline_s: float) -> None:
    """Sleep to a moment of `time.perf_counter`, whatever has been done since."""
    while (rest_s := deadline_s - time.perf_counter()) > 0:
        time.sleep(rest_s)


def _sleep_or_work(op_seconds: OpSeconds, work: Work, label: str) -> None:
    """Sleep for an op's seconds, or call its work."""
    begin_s = time.perf_counter()
    seconds = op_seconds(label)
    if seconds is None:
        work()
    else:
        sleep_until(begin_s + seconds)
