"""When the ops of one worker's lanes ran, and what takes their times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hocket.run.device.late import Late
from hocket.run.device.stopwatch import Seconds, Stopwatch, Times


@dataclass(frozen=True, slots=True)
class OpTimes:
    """When the ops of each lane ran, in this process's seconds; 0 if one did not.

    Args:
        times: the times of each lane, which a device may still have.
        num_ops: how many ops there are in all lanes.
    """

    times: Late[Sequence[Times]]
    num_ops: int

    @classmethod
    def joined(cls, records: Sequence[OpTimes]) -> OpTimes:
        """Put the times of several portions one behind the other."""
        lanes = zip(*(record.times.value for record in records), strict=True)
        joined = [
            (np.concatenate(starts), np.concatenate(ends))
            for starts, ends in (zip(*portions, strict=True) for portions in lanes)
        ]
        return cls(Late(lambda: joined), sum(record.num_ops for record in records))

    @property
    def start_s(self) -> tuple[Seconds, ...]:
        """The moment at which each op began, by lane; may wait for a device."""
        return tuple(start_s for start_s, _ in self.times.value)

    @property
    def end_s(self) -> tuple[Seconds, ...]:
        """The moment at which each op ended, by lane; may wait for a device."""
        return tuple(end_s for _, end_s in self.times.value)

    def take_late_ends(self, late_s: Sequence[Seconds]) -> None:
        """Correct the ends of ops that went on after their portion.

        Args:
            late_s: when each op ended by lane; 0 if it ended in its portion.
        """
        for end_s, late in zip(self.end_s, late_s, strict=True):
            end_s[late > 0.0] = late[late > 0.0]


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
