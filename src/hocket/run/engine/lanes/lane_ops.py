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
class LaneOp:
    """One op of a lane.

    Args:
        op: its step counts from the portion's first.
        text: what the flight recorder notes.
        action: plays it on a batch of each net.
        waits: values of other lanes that it needs.
        records: values of it that other lanes wait for.
        is_step_end: whether it is a reduction or an update.
    """

    op: Op
    text: str
    action: Callable[[NetBatches], None]
    waits: tuple[Value, ...]
    records: tuple[Value, ...]
    is_step_end: bool


@dataclass(frozen=True, slots=True)
class LaneOps:
    """One lane's part of a portion, ready to play.

    Args:
        ops: its ops.
        watch: takes their times.
        computes: which of them take the lane's own time.
    """

    ops: list[LaneOp]
    watch: Stopwatch
    computes: NDArray[np.bool_]
