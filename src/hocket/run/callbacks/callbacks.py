"""Calls loggers and callbacks; their errors are raised on all workers together.

    rank 0    step  step ✗ logged  step  step  evaluation  CallbackError
    rank 1    step  step           step  step  evaluation  CallbackError

On several workers, one that left at once would let the others wait. A worker alone
raises at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from hocket.errors import CallbackError, HocketError
from hocket.run.cluster.world import World
from hocket.run.data.metrics import EvaluationResult
from hocket.run.engine.sync.step_result import StepResult

log = logging.getLogger(__name__)

Callback = Callable[[StepResult, EvaluationResult | None], object]


class Callbacks:
    """Calls callbacks, and keeps their errors until all workers raise them.

    Args:
        callbacks: called in their order.
        world: the job.
        is_watched: whether errors are possible: the same on every worker, also where
            only rank 0 has callbacks.
    """

    def __init__(
        self, callbacks: Sequence[Callback], world: World, *, is_watched: bool
    ) -> None:
        self._callbacks = list(callbacks)
        self._world = world
        self._is_watched = is_watched
        self._failures: list[str] = []
        self._error: Exception | None = None  # the first one

    def call(self, result: StepResult, evaluation: EvaluationResult | None) -> bool:
        """Call all; return whether one asks to stop.

        Raises:
            CallbackError: one failed, and there is no other worker.
            HocketError: one called the pipeline, and that failed.
        """
        stops = False
        for callback in tuple(self._callbacks):
            try:
                stops |= callback(result, evaluation) is True
            except HocketError:  # of the pipeline: alike on all workers
                raise
            except Exception as error:
                name = getattr(callback, "__qualname__", type(callback).__name__)
                self.note(f"{name} failed after step {result.step}", error)
                self._callbacks.remove(callback)
                if self._world.world_size == 1:
                    self.raise_failures()
                log.exception("%s; training goes on without it", self._failures[-1])
        return stops

    def note(self, what: str, error: Exception) -> None:
        """Keep an error, to be raised with the others."""
        self._failures.append(f"{what}: {type(error).__name__}: {error}")
        self._error = self._error or error

    def raise_failures(self) -> None:
        """Raise the failures of all workers; every worker must call this.

        Raises:
            CallbackError: a callback failed on some worker.
        """
        if not self._is_watched:
            return
        by_rank = self._world.gather_json(self._failures, "failures of callbacks")
        failures = [f"rank {r}: {x}" for r, own in enumerate(by_rank) for x in own]
        self._failures = []
        if failures:
            raise CallbackError(
                f"{'; '.join(failures)}. The pipeline can be used as before"
            ) from self._error
