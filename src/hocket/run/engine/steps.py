"""Train step by step: each ends before the next begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from time import perf_counter

from hocket.core.schedule import Schedule
from hocket.errors import DataError
from hocket.run.data.loss import TOTAL
from hocket.run.data.step_batch import Work
from hocket.run.device.memory import peak_bytes
from hocket.run.diagnostics.flight_recorder import Ring
from hocket.run.engine.executor import StepCrew
from hocket.run.engine.flush_free import Guard
from hocket.run.engine.step_result import StepResult
from hocket.run.engine.worker import Record


class Steps:
    """Plays an order of one step, again and again.

    Args:
        schedule: the order.
        crew: this worker's.
        ring: told of each wait.
        guard: around what is played.
    """

    def __init__(
        self, schedule: Schedule, crew: StepCrew, ring: Ring, guard: Guard
    ) -> None:
        self._schedule = schedule
        self._crew = crew
        self._ring = ring
        self._guard = guard
        self._record: Record | None = None

    def train(
        self, steps: Iterable[list[Work]], drains: Callable[[int], bool]
    ) -> Iterator[StepResult]:
        """One result per step, in order; see `Stream.train`.

        Args:
            steps: each of one batch or several.
            drains: does not matter where nothing is under way between steps.
        """
        del drains
        for works in steps:
            yield self.step(works)

    def step(self, works: list[Work]) -> StepResult:
        """One step, to its end."""
        begin_s = perf_counter()
        number = works[0].step.number
        busy_s = 0.0
        with self._guard():
            for work in works:
                self._record = self._crew.train(work)
                busy_s += self._crew.worker.busy_s(self._record)
            self._ring.begin("losses", number)
            losses = self._crew.results.finish(number)
            self._ring.end()
        seconds = perf_counter() - begin_s
        return StepResult(
            number,
            losses[TOTAL],
            losses,
            works[0].step.num_samples,
            seconds,
            1.0 - busy_s / seconds,
            peak_bytes(self._crew.device),
            self._crew.judgement,
        )

    def settle(self) -> None:
        """End what is under way: nothing is, between two steps."""

    def go_on_from(self, number: int) -> None:
        """The next step is of this number: nothing here depends on it."""

    def last(self) -> tuple[Schedule, Record]:
        """The order of a step, and this lane's times in the last one.

        Raises:
            DataError: there was none.
        """
        if self._record is None:
            raise DataError("no step has been trained yet, so there is none to show")
        return self._schedule, self._record
