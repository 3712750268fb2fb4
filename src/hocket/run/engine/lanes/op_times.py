"""When the ops of one worker's lanes ran, and what takes their times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hocket.run.device.stopwatch import Seconds, Stopwatch


@dataclass(frozen=True, slots=True)
class OpTimes:
    """When the ops of each lane ran, in this process's seconds; 0 if one did not.

    Args:
        start_s: the moment at which each op began, by lane.
        end_s: the moment at which each op ended, by lane.
    """

    start_s: tuple[Seconds, ...]
    end_s: tuple[Seconds, ...]

    @classmethod
    def joined(cls, records: Sequence[OpTimes]) -> OpTimes:
        """Put the times of several portions one behind the other."""
        starts = zip(*(record.start_s for record in records), strict=True)
        ends = zip(*(record.end_s for record in records), strict=True)
        return cls(
            tuple(np.concatenate(times) for times in starts),
            tuple(np.concatenate(times) for times in ends),
        )

    def take_late_ends(self, late_s: Sequence[Seconds]) -> None:
        """Correct the ends of ops that went on after their portion.

        Args:
            late_s: when each op ended by lane; 0 if it ended in its portion.
        """
        for end_s, late in zip(self.end_s, late_s, strict=True):
            end_s[late > 0.0] = late[late > 0.0]

    @property
    def num_ops(self) -> int:
        """How many ops there are in all lanes."""
        return sum(len(times) for times in self.start_s)


@dataclass(frozen=True, slots=True)
class OpTimer:
    """Takes the times of one op.

    Args:
        start: called when the op begins.
        end: called when it has ended.
        run: calls a function with arguments, between `start` and `end`.
        late_end: called when it has ended after the end of its portion.
        lane: the number of the op's lane in the schedule.
    """

    start: Callable[[], None]
    end: Callable[[], None]
    run: Callable[..., Any]
    late_end: Callable[[], None]
    lane: int

    @classmethod
    def of(cls, watch: Stopwatch, index: int, num_ops: int, lane: int) -> OpTimer:
        """Take the times of the op that has number `index` in its lane.

        Args:
            watch: has twice as many places as ops: one more for each op's late end.
            index: the op's number.
            num_ops: how many there are.
            lane: the lane's number in the schedule.
        """

        def late_end() -> None:
            watch.start(num_ops + index)
            watch.end(num_ops + index)

        start, end = partial(watch.start, index), partial(watch.end, index)
        return cls(start, end, partial(watch.run, index), late_end, lane)
