"""The stream of a stand-in for a GPU: what was submitted, and what let the host wait.

host     add   mul   copy to the host   record event      wait for the event
stream     └─────┴──────────┴── queue ── add ── mul ── copy ──┘
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final

import torch

_EARLY_SHARE: Final = 0.02  # of calls behind which some of the queue runs
_LANE: Final = "_play_lane"  # the function that plays a lane's ops


@dataclass
class Waits:
    """What let the host wait.

    Args:
        all: the calls, in their order.
        in_lanes: those of them while a lane was played.
        queued: for each event that was waited for, how many ops were queued behind it.
        are_errors: whether a wait for all that was submitted is an error, as CUDA's are
            under `torch.cuda.set_sync_debug_mode("error")`; and one for an event with
            fewer ops behind it than `fewest`.
        fewest: see above.
    """

    all: list[str] = field(default_factory=list)
    in_lanes: list[str] = field(default_factory=list)
    queued: list[int] = field(default_factory=list)
    are_errors: bool = False
    fewest: int = 10

    def note(self, call: str, num_queued: int = 0) -> None:
        """Note a call, and how many ops the stream still has behind what it awaits."""
        if self.are_errors and num_queued < self.fewest:
            raise RuntimeError(f"{call}: the host waits, with {num_queued} ops queued")
        self.all.append(call)
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code.co_name == _LANE:
                self.in_lanes.append(call)
                return
            frame = frame.f_back

    def clear(self) -> None:
        """Begin anew."""
        self.all.clear()
        self.in_lanes.clear()
        self.queued.clear()


class Stream:
    """The only stream: ops and copies that have not run yet.

    Attributes:
        random: decides when some of them run before the host waits for them.
    """

    def __init__(self) -> None:
        self.waits = Waits()
        self.random = random.Random(0)
        self.pinned: set[int] = set()  # addresses
        self.num_submitted = 0
        self.num_ops = 0
        self.library: torch.library.Library | None = None  # as long as the process
        self._lock = threading.RLock()  # several senders' threads ask for their copies
        self._pending: deque[tuple[int, Callable[[], None]]] = deque()

    def add(self, finish: Callable[[], None]) -> None:
        """Add an op or a copy; it has run when it is waited for."""
        with self._lock:
            self.num_submitted += 1
            self._pending.append((self.num_submitted, finish))
            if self.random.random() < _EARLY_SHARE:
                self.finish(self.random.randint(0, self.num_submitted))

    def finish(self, number: int) -> None:
        """Run what was submitted, up to one number."""
        with self._lock, torch.no_grad():
            while self._pending and self._pending[0][0] <= number:
                self._pending.popleft()[1]()

    def wait(self, call: str) -> None:
        """Let the host wait for all."""
        self.waits.note(call)
        self.finish(self.num_submitted)


STREAM: Final = Stream()


class StandInEvent:
    """See `torch.Event`.

    Attributes:
        turn_s: how long the host waits for a stream that others' turns hold up.
    """

    turn_s = 0.0

    def __init__(self, device: Any = None, **_: Any) -> None:
        self._number = 0
        self._num_ops = 0
        self._s = 0.0
        self._is_late = True

    def record(self, stream: Any = None) -> None:
        """Record it behind all that the stream was given."""
        self._number, self._s = STREAM.num_submitted, time.perf_counter()
        self._num_ops = STREAM.num_ops

    def query(self) -> bool:
        """Return False at the first call, and True from the second on."""
        is_late, self._is_late = self._is_late, False
        if not is_late:
            STREAM.finish(self._number)
        return not is_late

    def synchronize(self) -> None:
        """Let the host wait for it."""
        time.sleep(self.turn_s)
        num_queued = STREAM.num_ops - self._num_ops
        STREAM.waits.note("synchronize", num_queued)
        STREAM.waits.queued.append(num_queued)
        STREAM.finish(self._number)

    def wait(self, stream: Any = None) -> None:
        """Let the stream wait for it, which runs in order anyway."""

    def elapsed_time(self, other: StandInEvent) -> float:
        """The milliseconds to another one."""
        return (other._s - self._s) * 1e3
