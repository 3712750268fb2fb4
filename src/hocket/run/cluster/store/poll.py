"""Polls for what other processes do, so that signals are handled meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_FIRST_PAUSE_S: Final = 0.0005
_LAST_PAUSE_S: Final = 0.02


def poll(is_ready: Callable[[], bool], timeout_s: float) -> bool:
    """Call a function until it returns True; return False after the timeout.

    Args:
        is_ready: called at least once, and again after pauses of up to 20 ms.
        timeout_s: the longest time to poll.
    """
    until_s = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while not is_ready():
        if time.monotonic() >= until_s:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)
    return True
