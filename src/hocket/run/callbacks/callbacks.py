"""Calls loggers and callbacks; all workers stop, and drop a callback, at the same step.

    rank 0    step  step ✗ logged  step  step  evaluation  CallbackError
    rank 1    step  step ✗         step  step  evaluation  CallbackError
                         └ all workers say whether they stop, and what failed

On several workers, one that left alone would let the others wait. A worker alone raises
at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.errors import CallbackError, DataError, HocketError
from hocket.run.cluster.group import GroupWork, WorkerGroup
from hocket.run.cluster.world import World
from hocket.run.data.metrics import EvaluationResult
from hocket.run.engine.sync.step_result import StepResult

log = logging.getLogger(__name__)
_WHAT: Final = "answers of callbacks"

Callback = Callable[[StepResult, EvaluationResult | None], object]


class Callbacks:
    """Calls callbacks, and keeps their errors until all workers raise them.

    Args:
        callbacks: called in their order; every worker has as many.
        loggers: called behind them; this worker's own, which stop nothing.
        world: the job.
        is_watched: whether errors are possible: the same on every worker, also where
            only rank 0 has loggers.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        loggers: Sequence[Callback],
        world: World,
        *,
        is_watched: bool,
    ) -> None:
        self._num_shared = len(callbacks)
        self._callbacks = dict(enumerate((*callbacks, *loggers)))
        self._world = world
        self._is_watched = is_watched
        self._failures: list[str] = []
        self._error: Exception | None = None  # the first one
        self._dropped: dict[int, str] = {}  # here, and not known to the others
        self._answers: tuple[GroupWork, Tensor] | None = None  # of all, not read yet
        self._group: WorkerGroup | None = None
        if callbacks and world.world_size > 1:
            everyone = tuple(range(world.world_size))
            self._group = WorkerGroup(
                dist.group.WORLD, everyone, world.rank, world.timeout_s, _ignore
            )

    def call(
        self,
        result: StepResult,
        evaluation: EvaluationResult | None,
        *,
        waits: bool = True,
    ) -> bool:
        """Call all; return whether a callback asks to stop, the same on all workers.

        Args:
            result: the step's.
            evaluation: the one that has followed it, if any.
            waits: whether to wait for the other workers' answers; else they are read
                before the next call, which is not made if one of them stops.

        Raises:
            CallbackError: one failed, and there is no other worker.
            HocketError: one called the pipeline, and that failed.
            WaitError: another worker did not come.
        """
        if self._agree():
            return True
        stops = False
        for number, callback in [*self._callbacks.items()]:
            try:
                stops |= callback(result, evaluation) is True
            except HocketError:  # of the pipeline: alike on all workers
                raise
            except Exception as error:
                name = getattr(callback, "__qualname__", type(callback).__name__)
                self.note(f"{name} failed after step {result.step}", error)
                del self._callbacks[number]
                if self._world.world_size == 1:
                    self.raise_failures()
                log.exception("%s; training goes on without it", self._failures[-1])
                if number < self._num_shared:
                    self._dropped[number] = self._failures[-1]
        if self._group is None:
            return stops
        answers = torch.tensor([stops, len(self._dropped)])
        self._answers = self._group.all_reduce(answers, _WHAT), answers
        return waits and self._agree()

    def note(self, what: str, error: Exception) -> None:
        """Keep an error, to be raised with the others."""
        self._failures.append(f"{what}: {type(error).__name__}: {error}")
        self._error = self._error or error

    def raise_failures(self) -> None:
        """Raise the failures of all workers; every worker must call this.

        Raises:
            CallbackError: a callback failed on some worker.
        """
        self._agree()
        if not self._is_watched:
            return
        by_rank = self._world.gather_json(self._failures, "failures of callbacks")
        failures = [f"rank {r}: {x}" for r, own in enumerate(by_rank) for x in own]
        self._failures = []
        if failures:
            raise CallbackError(
                f"{'; '.join(failures)}. The pipeline can be used as before"
            ) from self._error

    def _agree(self) -> bool:
        """Read all workers' answers, and drop what failed; return whether one stops."""
        if self._group is None or self._answers is None:
            return False
        (work, answers), self._answers = self._answers, None
        self._group.wait(work, _WHAT)
        num_stops, num_dropped = answers.tolist()
        if num_dropped:
            by_rank = self._world.gather_json(
                [*self._dropped.items()], "callbacks that failed"
            )
            self._dropped = {}
            for rank, dropped in enumerate(by_rank):
                for number, failure in dropped:
                    if self._callbacks.pop(number, None) is not None:
                        log.error("on rank %d %s; no rank calls it", rank, failure)
        return bool(num_stops)


def refuse_different_numbers(callbacks: Sequence[Callback], world: World) -> None:
    """Refuse callbacks that not every worker has; every worker must call this.

    Raises:
        DataError: gives the numbers.
    """
    numbers = world.gather_json(len(callbacks), "numbers of callbacks")
    if len({*numbers}) > 1:
        each = ", ".join(f"{number} on rank {r}" for r, number in enumerate(numbers))
        raise DataError(
            f"the number of callbacks differs ({each}): give every worker the same; "
            "one that is for one worker alone can ask `pipeline.is_main`"
        )


def _ignore(what: str, rank: int) -> None:
    """Note no wait: ops alone are noted."""
