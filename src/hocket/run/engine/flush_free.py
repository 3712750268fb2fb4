"""Train without flushes: read batches ahead, play portions, hand out results in order.

    batches    0 1 2 │ 3 │ 4 │ end                 drain: when the batches end, and
    plays     opening│ again │ closing             whenever somebody wants to look at
    results          0   1   2  3 4                the weights

No number depends on where it drains: old weights stay for the steps that read them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Final, Protocol

import numpy as np

from hocket.core.schedule import Schedule
from hocket.errors import DataError
from hocket.passes.one_step import one_step
from hocket.run.data.loss import TOTAL
from hocket.run.data.step_batch import Work
from hocket.run.device.memory import peak_bytes
from hocket.run.engine.executor import StreamCrew
from hocket.run.engine.step_result import StepResult
from hocket.run.engine.stream_worker import Portion
from hocket.run.engine.worker import Record

_MOST_OPS: Final = 200_000  # of a lane, whose times are kept: some megabytes


class Guard(Protocol):
    """Makes a context in which ops are played: errors are reported, and so on."""

    def __call__(self) -> AbstractContextManager[None]:
        """For one portion, or several in a row."""


@dataclass(slots=True)
class _Segment:
    """From an opening to its closing, or as many steps alone.

    Args:
        first: the step that it begins with.
        offset: steps by which the next portion is later than the first.
        num_ended: steps that are over.
        records: of all portions.
        num_ops: in them.
    """

    first: int
    offset: int = 0
    num_ended: int = 0
    records: list[Record] = field(default_factory=list)
    num_ops: int = 0

    def keep(self, record: Record) -> None:
        """Keep a portion's times, as long as there are not too many."""
        self.num_ops += len(record.start_s)
        if self.num_ops <= _MOST_OPS:
            self.records.append(record)
        else:
            self.records.clear()


class Stream:
    """Plays an order that has a body, on as many batches as come.

    Args:
        schedule: the order.
        crew: this worker's.
        guard: around what is played.
    """

    def __init__(self, schedule: Schedule, crew: StreamCrew, guard: Guard) -> None:
        self._schedule = schedule
        self._crew = crew
        self._worker = crew.worker
        self._guard = guard
        self._waiting: deque[Work] = deque()  # read, and not begun
        self._works: dict[int, Work] = {}  # begun, and not over
        self._open: _Segment | None = None
        self._last: _Segment | None = None
        self._results: deque[StepResult] = deque()  # of the loop that goes on

    @property
    def is_settled(self) -> bool:
        """Whether no step is under way, or waits to be."""
        return not self._waiting and self._open is None

    def train(
        self, steps: Iterable[list[Work]], drains: Callable[[int], bool]
    ) -> Iterator[StepResult]:
        """One result per step, in order.

        Args:
            steps: numbered one after the other, each of one batch.
            drains: whether, after the step of a number, all that are under way
                are ended before their results are handed out.
        """
        self.settle()
        own = self._results = deque()  # another loop may be half way through its own
        for (work,) in steps:
            self._results = own
            self._waiting.append(work)
            with self._guard():
                self._go_on()
            if drains(work.step.number):
                self.settle()
            while own:
                yield own.popleft()
        self._results = own
        self.settle()
        while own:
            yield own.popleft()

    def step(self, works: list[Work]) -> StepResult:
        """One step, and all before it, to its end."""
        (work,) = works
        self._waiting.append(work)
        self.settle()
        return self._results.pop()

    def settle(self) -> None:
        """End all steps that were begun, or whose batches were read."""
        if not self.is_settled:
            with self._guard():
                self._go_on()
                self._end()

    def go_on_from(self, number: int) -> None:
        """The next step is of this number, after another state was loaded."""
        self._crew.go_on_from(number)

    def last(self) -> tuple[Schedule, Record]:
        """What was played between the last two drains: its order, the lane's times.

        Raises:
            DataError: nothing yet; or so many steps that their times were not kept.
        """
        self.settle()
        segment = self._last
        if segment is None:
            raise DataError("no step has been trained yet, so there is none to show")
        if not segment.records:
            raise DataError(
                f"{segment.num_ended} steps were trained without a pause, too many to "
                "keep all their times: train fewer at a time, as with drain_every=50"
            )
        starts = np.concatenate([record.start_s for record in segment.records])
        ends = np.concatenate([record.end_s for record in segment.records])
        return self._order_of(segment.num_ended), Record(starts, ends)

    def _go_on(self) -> None:
        """Play all that can be played whether or not more batches come."""
        if self._open is None and len(self._waiting) == self._worker.num_steps:
            self._open = _Segment(self._waiting[0].step.number)
            self._play(
                self._open,
                Portion.OPENING,
                num_begun=len(self._waiting),
                num_ended=self._worker.num_ended,
            )
        while self._open is not None and self._waiting:
            self._play(self._open, Portion.AGAIN, num_begun=1, num_ended=1)
            self._open.offset += 1

    def _end(self) -> None:
        if self._open is not None:
            self._last, self._open = self._open, None
            num_left = len(self._works)
            self._play(self._last, Portion.CLOSING, num_begun=0, num_ended=num_left)
        elif self._waiting:
            self._last = _Segment(self._waiting[0].step.number)
            while self._waiting:
                self._play(self._last, Portion.ALONE, num_begun=1, num_ended=1)
                self._last.offset += 1

    def _play(
        self, segment: _Segment, portion: Portion, *, num_begun: int, num_ended: int
    ) -> None:
        begin_s = perf_counter()
        begun = [self._waiting.popleft() for _ in range(num_begun)]
        self._works |= {work.step.number: work for work in begun}
        first = segment.first + segment.offset
        record = self._crew.play(portion, first, self._works, begun)
        segment.keep(record)
        number = segment.first + segment.num_ended
        over = [self._works.pop(number + i) for i in range(num_ended)]
        ends = [self._crew.ends.end(work.step.number) for work in over]
        segment.num_ended += num_ended
        seconds = perf_counter() - begin_s
        bubble = 1.0 - self._worker.busy_in(portion, record) / seconds
        for work, (losses, judgement) in zip(over, ends, strict=True):
            result = StepResult(
                work.step.number,
                losses[TOTAL],
                losses,
                work.step.num_samples,
                seconds / num_ended,
                bubble,
                peak_bytes(self._crew.device),
                judgement,
            )
            self._results.append(result)

    def _order_of(self, num_steps: int) -> Schedule:
        if num_steps >= self._worker.num_steps:
            return self._schedule.with_num_steps(num_steps)
        alone = one_step(self._schedule).with_num_steps(num_steps)
        program = replace(self._schedule.program, num_steps=num_steps)
        return replace(alone, program=program)


def drains_after(every: int | Callable[[int], bool] | None) -> Callable[[int], bool]:
    """Whether to drain after the step of a number.

    Raises:
        DataError: it is no number of steps.
    """
    if callable(every):
        return every
    if every is None:
        return lambda _: False
    if every < 1:
        raise DataError(f"drain_every is {every}: it is a number of steps")
    return lambda number: (number + 1) % every == 0
