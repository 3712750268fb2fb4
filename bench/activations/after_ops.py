"""The bytes alive on a worker after each op of a step, from the allocator.

op  ├── 0F0 ──┤├── 0F1 ──┤├── 0B0 ──┤ ...
           after      after      after        what each op leaves
        inside     inside     inside          the most while it runs
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

import hocket
from hocket.model.profile.allocations import AllocationLog, allocations
from hocket.run.engine.lanes.concurrent_lanes import LaneOp
from hocket.run.engine.lanes.play_plan import Portion
from hocket.run.engine.lanes.player import Player


@dataclass(frozen=True, slots=True)
class OpBytes:
    """What one worker holds beyond what was there before the step.

    Args:
        after: each op of its lane.
        inside: the most while it runs, or between the op before and it.
    """

    after: list[int]
    inside: list[int]


def bytes_of_ops(pipeline: hocket.Pipeline, batch: Any) -> OpBytes:
    """Train one step, and see what its ops leave. Every worker must call this.

    Args:
        pipeline: that has trained a step or two, so that all is there that stays.
        batch: to train on.
    """
    player = pipeline._executor.player
    assert isinstance(player, Player)
    (lane,) = player._parts[Portion.STEP]
    with allocations(torch.device("cpu")) as log:
        marks = _Marks(log)
        ops = list(lane.ops)
        lane.ops[:] = [marks.at_end_of(lane_op) for lane_op in ops]
        try:
            pipeline.step(batch)
        finally:
            lane.ops[:] = ops
            marks.close()
    after = list(accumulate(log.left))[: marks.num_ops]
    peaks = zip([0, *after], log.peaks, strict=False)
    return OpBytes(after, [before + peak for before, peak in peaks][: marks.num_ops])


class _Marks:
    """Begins a span of the log whenever an op has ended.

    Args:
        log: the allocations.
    """

    def __init__(self, log: AllocationLog) -> None:
        self.num_ops = 0
        self._log = log
        self._span = self._begun()

    def at_end_of(self, lane_op: LaneOp) -> LaneOp:
        """Return the op with a mark where its time ends."""
        timer = lane_op.timer
        end, run = partial(self._end, timer.end), partial(self._end, timer.run)
        return replace(lane_op, timer=replace(timer, end=end, run=run))

    def _end(self, end: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = end(*args, **kwargs)
        self.close()
        self.num_ops += 1
        self._span = self._begun()
        return result

    def close(self) -> None:
        """End the last span."""
        self._span.__exit__(None, None, None)

    def _begun(self) -> AbstractContextManager[None]:
        span = self._log.span()
        span.__enter__()
        return span
