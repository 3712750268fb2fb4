"""What a running job asks of the gates, in this process or in another one."""

from __future__ import annotations

from abc import ABC, abstractmethod

from hocket.sharing.forecast import Forecast
from hocket.sharing.policy import Mode, Point


class StoppedError(BaseException):
    """Ends a job's thread whose gate is closed for good. No error of the job."""


class Gates(ABC):
    """The gates of jobs that share a device. Methods raise `StoppedError`."""

    @property
    @abstractmethod
    def mode(self) -> Mode:
        """How jobs share now."""

    @abstractmethod
    def wait_for_others(self, name: str) -> None:
        """Wait until all jobs are made; this one is."""

    @abstractmethod
    def leave(self, name: str) -> None:
        """Remove a job, if it was not abandoned; the others go on."""

    @abstractmethod
    def pass_through(self, name: str, point: Point) -> None:
        """Wait until the policy lets the job go on."""

    @abstractmethod
    def begin_backward(self, name: str) -> None:
        """Mark the start of a backward that no gate holds."""

    @abstractmethod
    def pause(self, name: str) -> None:
        """Mark that a job leaves a half of its iteration, in tick-tock."""

    @abstractmethod
    def finish(self, name: str, *, kind: str, goes_on: bool, is_watched: bool) -> None:
        """Mark the end of an iteration.

        Args:
            name: the job.
            kind: see `JobContext.kind`.
            goes_on: whether the job comes to its gate at once: then no other job is
                asked before it does, and it may go first again.
            is_watched: whether its memory was watched, which takes time.
        """

    @abstractmethod
    def must_watch(self, name: str) -> bool:
        """Return whether the memory of the job's next iterations is to be recorded."""

    @abstractmethod
    def observe(
        self, name: str, seen: Forecast, left_bytes: float, grown_bytes: float
    ) -> float:
        """Judge a job's forecast by what was recorded; see `Board.observe`."""
