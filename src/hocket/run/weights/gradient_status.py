"""The status of one step's gradients, which is waited for when it is first read."""

from __future__ import annotations

from collections.abc import Callable

from hocket.errors import WaitError
from hocket.run.weights.gradients import GradientStatus


class PendingGradientStatus:
    """The status of one step's gradients; the first read waits for it.

    Args:
        step: the step's number.
        wait: waits for the status; called once.
    """

    def __init__(self, step: int, wait: Callable[[], GradientStatus]) -> None:
        self.step = step
        self._wait: Callable[[], GradientStatus] | None = wait
        self._status = GradientStatus(0.0)
        self._fault = ""

    @property
    def status(self) -> GradientStatus:
        """The gradients' status, the same on all workers.

        Raises:
            WaitError: another worker did not post its norms, or the pipeline was closed
                before the status was read.
        """
        if self._fault:
            raise WaitError(self._fault)
        if self._wait is not None:
            try:
                self._status = self._wait()
            except WaitError as error:
                self._fault = str(error)
                raise
            self._wait = None
        return self._status

    def give_up(self) -> None:
        """Mark the status as unavailable, because the pipeline is closed."""
        if self._wait is not None and not self._fault:
            self._fault = (
                f"the norm of step {self.step}'s gradients is unknown: the pipeline "
                "was closed before all workers had sent theirs"
            )
