"""The ops of a lane, each with the function that plays it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hocket.core.dataflow import Value
from hocket.core.op import Op
from hocket.run.data.step_batch import NetBatches, StepBatch
from hocket.run.device.stopwatch import Seconds, Stopwatch


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

    def busy_s(self, start_s: Seconds, end_s: Seconds) -> float:
        """Return how long the lane itself worked, in seconds.

        Args:
            start_s: when each op began.
            end_s: when each op ended.
        """
        return float((end_s - start_s)[self.computes].sum())


class Countdown:
    """Counts the microbatches of each stage's batches down to the last one."""

    def __init__(self) -> None:
        self._left: dict[tuple[int, tuple[int, int]], int] = {}

    def is_last(self, stage: int, work: StepBatch) -> bool:
        """Count one microbatch of a stage's batch; return whether it was the last."""
        key = stage, work.step.key
        num_left = self._left.pop(key, len(work.microbatches)) - 1
        if num_left:
            self._left[key] = num_left
        return not num_left
