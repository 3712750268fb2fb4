"""When one op of a lane begins and ends."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.run.device.stopwatch import Stopwatch


@dataclass(frozen=True, slots=True)
class OpTimer:
    """Takes the times of one op.

    Args:
        watch: takes those of all ops of a lane.
        index: the op's number in the lane.
        lane: the lane's number in the schedule.
    """

    watch: Stopwatch
    index: int
    lane: int

    def start(self) -> None:
        """Note that the op begins."""
        self.watch.start(self.index)

    def end(self) -> None:
        """Note that the op has ended."""
        self.watch.end(self.index)
