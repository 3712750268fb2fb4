"""What is found out about one step's gradients, when somebody wants to know it."""

from __future__ import annotations

from collections.abc import Callable

from hocket.errors import WaitError
from hocket.run.weights.gradients import Verdict


class Judgement:
    """One step's verdict; the first to ask waits for it, where it has not come yet.

    Args:
        step: whose gradients they are.
        learn: finds out; called once.
    """

    def __init__(self, step: int, learn: Callable[[], Verdict]) -> None:
        self.step = step
        self._learn: Callable[[], Verdict] | None = learn
        self._verdict = Verdict(0.0)
        self._fault = ""

    @property
    def verdict(self) -> Verdict:
        """What all workers know.

        Raises:
            WaitError: another worker did not tell about its gradients; or the pipeline
                ended before anybody asked.
        """
        if self._fault:
            raise WaitError(self._fault)
        if self._learn is not None:
            try:
                self._verdict = self._learn()
            except WaitError as error:
                self._fault = str(error)
                raise
            self._learn = None
        return self._verdict

    def give_up(self) -> None:
        """The pipeline ends: what is not known by now will never be."""
        if self._learn is not None and not self._fault:
            self._fault = (
                f"nothing is known about all gradients of step {self.step}: the "
                "pipeline ended before this worker had heard of those of the others"
            )
