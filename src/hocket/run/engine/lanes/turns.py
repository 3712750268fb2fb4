"""The ops of a lane, each with the function that plays it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hocket.core.dataflow import Value
from hocket.core.op import Op
from hocket.run.data.step_batch import NetBatches
from hocket.run.device.stopwatch import Stopwatch


@dataclass(frozen=True, slots=True)
class Turn:
    """One op of a lane.

    Args:
        op: its step counts from the portion's first.
        text: what the flight recorder notes.
        action: plays it on a batch of each net.
        waits: values of other lanes that it needs.
        records: values of it that other lanes wait for.
        ends_step: whether it is a reduction or an update.
    """

    op: Op
    text: str
    action: Callable[[NetBatches], None]
    waits: tuple[Value, ...]
    records: tuple[Value, ...]
    ends_step: bool


@dataclass(frozen=True, slots=True)
class LaneTurns:
    """One lane's part of a portion, ready to play.

    Args:
        turns: its ops.
        watch: takes their times.
        computes: which of them take the lane's own time.
    """

    turns: list[Turn]
    watch: Stopwatch
    computes: NDArray[np.bool_]
