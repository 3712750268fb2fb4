"""Decides which lane of a CPU device may run: all at once, or as a test chooses."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeAlias

from hocket.run.device.generators import GeneratorLock

Ready: TypeAlias = Callable[[], bool]


class LaneScheduler(ABC):
    """Decides in which order the threads of one device run.

    Attributes:
        condition: guards the device's state, and is notified of each change.
    """

    condition: threading.Condition

    @abstractmethod
    def wait_for(self, lane: int, ready: Ready, timeout_s: float | None) -> bool:
        """Block the thread of a lane until `ready()`; call it with `condition` held.

        Returns:
            `ready()`, which is false if the time is up or no lane can make it true.
        """

    @abstractmethod
    def acquire(self, lane: int, lock: GeneratorLock, timeout_s: float) -> bool:
        """Acquire a lock for the thread of a lane; return whether it was acquired."""

    @abstractmethod
    def switch(self, lane: int) -> None:
        """Let another lane run first, if the scheduler chooses one."""

    @abstractmethod
    def release(self) -> None:
        """Let all lanes run freely from now on, since the device ends."""


class FreeRunning(LaneScheduler):
    """All lanes run at once, as the system schedules their threads."""

    def __init__(self) -> None:
        self.condition = threading.Condition()

    def wait_for(self, lane: int, ready: Ready, timeout_s: float | None) -> bool:
        """See `LaneScheduler.wait_for`."""
        return self.condition.wait_for(ready, timeout_s)

    def acquire(self, lane: int, lock: GeneratorLock, timeout_s: float) -> bool:
        """See `LaneScheduler.acquire`."""
        return lock.acquire(timeout_s)

    def switch(self, lane: int) -> None:
        """See `LaneScheduler.switch`."""

    def release(self) -> None:
        """See `LaneScheduler.release`."""
