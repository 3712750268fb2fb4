"""What is found out about one step's gradients, when somebody wants to know it."""

from __future__ import annotations

from collections.abc import Callable

from hocket.errors import WaitError
from hocket.run.weights.gradients import GradientStatus


class PendingGradientStatus:
    """One step's verdict; the first to ask waits for it, where it has not come yet.

    Args:
        step: whose gradients they are.
        wait: finds out; called once.
    """

    def __init__(self, step: int, wait: Callable[[], GradientStatus]) -> None:
        self.step = step
        self._wait: Callable[[], GradientStatus] | None = wait
        self._status = GradientStatus(0.0)
        self._fault = ""

    @property
    def status(self) -> GradientStatus:
        """What all workers know.

        Raises:
            WaitError: another worker did not tell about its gradients; or the pipeline
                ended before anybody asked.
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
        """The pipeline ends: what is not known by now will never be."""
        if self._wait is not None and not self._fault:
            self._fault = (
                f"nothing is known about all gradients of step {self.step}: the "
                "pipeline ended before this worker had heard of those of the others"
            )
