"""Runs a CPU device's lanes one at a time, in an order drawn from a seed.

Another lane may follow where an op begins or an event is recorded or waited for. What a
test then finds, the same seed replays:

    points     0      1      2      3      4
    lane 0   [0F0]   ...    ...   [0F1]   ...        `picked`: 0 1 1 0 1
    lane 1    ...  [0W0]  [0W1]    ...   [0U]
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Sequence
from enum import Enum, auto
from typing import Final, assert_never

from hocket.run.device.cpu_lane import LaneScheduler, Ready
from hocket.run.device.generators import GeneratorLock

log = logging.getLogger(__name__)


class ScheduleChoice(Enum):
    """The rule by which an `Interleaver` picks the next lane."""

    UNIFORM = auto()  # any lane that can run, at each point
    PCT = auto()  # the one of highest priority; a few points lower one


class Interleaver(LaneScheduler):
    """One lane runs at a time; which one follows from the seed alone.

    With `ScheduleChoice.PCT`, a fault that needs `d` lanes' ops in a certain order is
    found with a probability of at least 1 / (n k^(d-1)) for n lanes and k points.

    Source: Burckhardt et al., "A Randomized Scheduler with Probabilistic Guarantees of
    Finding Bugs", ASPLOS 2010, section 3; the Rust library Shuttle does the same.

    Args:
        seed: the seed of the choices.
        num_lanes: the number of the device's lanes; lane 0 begins.
        draw: the way to choose.
        num_changes: with PCT, the number of points that lower a priority (d - 1).
        num_points: with PCT, the expected number of points of a run (k).
    """

    def __init__(
        self,
        seed: int,
        num_lanes: int,
        draw: ScheduleChoice = ScheduleChoice.PCT,
        num_changes: int = 2,
        num_points: int = 50,
    ) -> None:
        self.condition = threading.Condition()
        self.picked: list[int] = []  # the lane that ran, for each point
        self._draw: Final = draw
        self._random = random.Random(seed)
        self._num_lanes = num_lanes
        priorities = range(num_changes, num_changes + num_lanes)
        self._priorities = self._random.sample(priorities, num_lanes)
        self._changes = self._random.sample(range(num_points), num_changes)
        self._waiting: dict[int, Ready] = {}
        self._running = 0
        self._released = False

    def wait_for(self, lane: int, ready: Ready, timeout_s: float | None) -> bool:
        """See `LaneScheduler.wait_for`. Returns at once if no lane at all is ready."""
        self._waiting[lane] = ready
        try:
            if not self._released and not self._wait_for_turn(lane, timeout_s):
                return False
            return not self._released or self.condition.wait_for(ready, timeout_s)
        finally:
            del self._waiting[lane]

    def acquire(self, lane: int, lock: GeneratorLock, timeout_s: float) -> bool:
        """See `LaneScheduler.acquire`. Blocks only if no other lane can run."""
        thread = threading.get_ident()  # another thread may call the function below
        with self.condition:
            self.wait_for(lane, lambda: lock.is_free_for(thread), timeout_s)
        return lock.acquire(timeout_s)

    def switch(self, lane: int) -> None:
        """See `LaneScheduler.switch`."""
        with self.condition:
            self.wait_for(lane, lambda: True, None)

    def release(self) -> None:
        """See `LaneScheduler.release`."""
        with self.condition:
            self._released = True
            self.condition.notify_all()

    def _wait_for_turn(self, lane: int, timeout_s: float | None) -> bool:
        """Pass the turn on and wait for it; return False if no lane can take it."""
        if lane == self._running:
            # Threads that have just been started are not waiting yet.
            self.condition.wait_for(lambda: len(self._waiting) == self._num_lanes)
            ready = [i for i in sorted(self._waiting) if self._waiting[i]()]
            if not ready:
                return False
            self._running = self._pick(ready)
            self.picked.append(self._running)
        self.condition.notify_all()
        if not self.condition.wait_for(
            lambda: self._running == lane or self._released, timeout_s
        ):
            self._released = True  # so that the other lanes do not hang, too
            self.condition.notify_all()
            log.warning(
                "lane %d has run for %.1f s; all lanes run freely now, and the seed "
                "does not replay it",
                self._running,
                timeout_s,
            )
        return True

    def _pick(self, ready: Sequence[int]) -> int:
        """Choose among the lanes that can run."""
        match self._draw:
            case ScheduleChoice.UNIFORM:
                return self._random.choice(ready)
            case ScheduleChoice.PCT:
                point = len(self.picked)
                if point in self._changes:
                    self._priorities[self._running] = self._changes.index(point)
                return max(ready, key=self._priorities.__getitem__)
            case _:
                assert_never(self._draw)
