"""Train: read batches, play portions, hand out results in order.

    batches    0 1 2    │ 3    │ 4    │ end            0    │ 1    │ 2
    plays      prologue │ body │ body │ epilogue       step │ step │ step
    results    0        │ 1    │ 2    │ 3 4            0    │ 1    │ 2

A schedule whose steps overlap drains (plays its epilogue) when the batches end, and
whenever the weights are asked for. No number depends on where it drains: old weights
stay for the steps that read them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Final

from hocket.core.schedule import Schedule
from hocket.errors import DataError
from hocket.passes.one_step import one_step
from hocket.run.data.step_batch import NetBatches, first_of
from hocket.run.device.late import Late
from hocket.run.device.memory import peak_bytes
from hocket.run.engine.executor import Executor
from hocket.run.engine.lanes.op_times import OpTimes
from hocket.run.engine.lanes.play_plan import Portion
from hocket.run.engine.sync.step_result import StepResult, StepSeconds

_MOST_OPS: Final = 200_000  # whose times are kept: some megabytes


@dataclass(slots=True)
class _Segment:
    """What is played between two drains.

    Args:
        first: the number of what it begins with, among all that was begun.
        offset: steps, or batches, by which the next portion is later than the first.
        num_ended: how many of them are over.
        records: the times of all portions.
        num_ops: the number of ops in them.
        data_waits_s: begin and end of the waits for its batches.
    """

    first: int
    offset: int = 0
    num_ended: int = 0
    records: list[OpTimes] = field(default_factory=list)
    num_ops: int = 0
    data_waits_s: list[tuple[float, float]] = field(default_factory=list)

    def keep(self, record: OpTimes) -> None:
        """Keep a portion's times, as long as there are not too many."""
        self.num_ops += record.num_ops
        if self.num_ops <= _MOST_OPS:
            self.records.append(record)
        else:
            self.records.clear()


@dataclass(eq=False)
class Driver:
    """Plays a schedule on as many batches as come.

    Args:
        executor: this worker's.
        guard: is entered around what is played.
        played: called when a portion was played; steps may still be under way.

    Attributes:
        data_waits_s: begin and end of the waits for batches that are not played yet;
            who reads them adds to it.
    """

    executor: Executor
    guard: Callable[[], AbstractContextManager[None]]
    played: Callable[[], None]

    def __post_init__(self) -> None:
        """Begin without a step."""
        self._plan = self.executor.plan
        self._recorder = self.executor.context.recorder
        self._waiting: deque[list[NetBatches]] = deque()  # read, and not begun
        self._works: dict[int, NetBatches] = {}  # begun, and not over, in their order
        self._num_begun = 0  # steps, or batches where forwards run ahead
        self._open: _Segment | None = None
        self._last: _Segment | None = None
        self._results: deque[StepResult] = deque()  # of the loop that goes on
        self._times = Late(lambda: StepSeconds(0.0, 0.0, 0.0))  # of the portion before
        self.last_result: StepResult | None = None
        self.data_waits_s: list[tuple[float, float]] = []

    @property
    def is_drained(self) -> bool:
        """Whether no step is under way, or waits to be."""
        return not self._waiting and self._open is None

    def train(
        self, steps: Iterable[list[NetBatches]], drains: Callable[[int], bool]
    ) -> Iterator[StepResult]:
        """Yield one result per step, in order.

        Args:
            steps: numbered one after the other, each of one batch or, where steps do
                not overlap, of several.
            drains: says whether, after the step of a number, all that are under way
                are ended before their results are handed out.
        """
        self.drain()
        own = self._results = deque()  # another loop may be half way through its own
        for works in steps:
            self._results = own
            with self.guard():
                self._enqueue(works)
                self._advance()
            if drains(first_of(works[0]).step.number):
                self.drain()
            while own:
                yield own.popleft()
        self._results = own
        self.finish()
        while own:
            yield own.popleft()

    def step(self, works: list[NetBatches]) -> StepResult:
        """Play one step, and all before it, to its end."""
        with self.guard():
            self._enqueue(works)
        self.drain()
        return self._results.pop()

    def drain(self) -> None:
        """End all steps that were begun, or whose batches were read.

        Raises:
            RunError: the run has ended.
        """
        with self.guard():
            if not self.is_drained:
                self._advance()
                self._end()

    def finish(self) -> None:
        """Drain, and raise what the last step's message or its device says.

        Raises:
            RunError: the last step failed; or the run has ended.
        """
        self.drain()
        with self.guard():
            self.executor.sync.check_last()

    def go_on_with(self, executor: Executor) -> None:
        """Play what another executor plays, from the next step on; no step is open."""
        assert self.is_drained
        self.executor, self._plan, self._last = executor, executor.plan, None

    def resume_from(self, number: int) -> None:
        """Set the number of the next step, after another state was loaded."""
        self.executor.resume_from(number)

    def last(self) -> tuple[Schedule, OpTimes, list[tuple[float, float]]]:
        """Return what was played between the last two drains: order, times, data waits.

        Where steps do not overlap, that is the last step.

        Raises:
            DataError: nothing yet; or so many steps that their times were not kept.
        """
        self.drain()
        segment = self._last
        if segment is None:
            raise DataError("no step has been trained yet, so there is none to show")
        if not segment.records:
            raise DataError(
                f"{segment.num_ended} steps were trained without a pause, too many to "
                "keep all their times: train fewer at a time, as with drain_every=50"
            )
        order = self._order_of(segment.num_ended)
        return order, OpTimes.joined(segment.records), segment.data_waits_s

    def _enqueue(self, works: list[NetBatches]) -> None:
        """Let a step's batches wait to be played.

        Where forwards run ahead, each batch is played by itself: a body has the
        forwards of the next batch, which may be of the same step.
        """
        works = self.executor.sync.with_counts(works)
        if self._plan.overlaps:
            self._waiting += [[work] for work in works]
        else:
            self._waiting.append(works)

    def _advance(self) -> None:
        """Play all that can be played whether or not more batches come."""
        if not self._plan.overlaps:
            while self._waiting:
                self._last = _Segment(self._num_begun)
                self._play(self._last, Portion.STEP, num_begun=1, num_ended=1)
            return
        if self._open is None and len(self._waiting) == self._plan.num_steps:
            self._open = _Segment(self._num_begun)
            self._play(
                self._open,
                Portion.PROLOGUE,
                num_begun=len(self._waiting),
                num_ended=self._plan.num_ended,
            )
        while self._open is not None and self._waiting:
            self._play(self._open, Portion.BODY, num_begun=1, num_ended=1)
            self._open.offset += 1

    def _end(self) -> None:
        if self._open is not None:
            self._last, self._open = self._open, None
            num_left = len(self._works)
            self._play(self._last, Portion.EPILOGUE, num_begun=0, num_ended=num_left)
        elif self._waiting:
            self._last = _Segment(self._num_begun)
            while self._waiting:
                self._play(self._last, Portion.STEP, num_begun=1, num_ended=1)
                self._last.offset += 1

    def _play(
        self, segment: _Segment, portion: Portion, *, num_begun: int, num_ended: int
    ) -> None:
        begun = [self._waiting.popleft() for _ in range(num_begun)]
        begin_s = perf_counter()
        sync = self.executor.sync
        first = segment.first + segment.offset
        records = []
        for i in range(max((len(works) for works in begun), default=1)):
            batches = [works[i] for works in begun]
            self._works |= dict(enumerate(batches, self._num_begun))
            records.append(self.executor.play(portion, first, self._works, batches))
        self.played()
        self._num_begun += num_begun
        segment.keep(records[-1])
        segment.data_waits_s += self.data_waits_s
        self.data_waits_s.clear()
        number = segment.first + segment.num_ended
        over = [first_of(self._works.pop(number + i)) for i in range(num_ended)]
        headers = [work.step for work in over if work.ends_step]
        self._recorder.begin("losses", headers[0].number if headers else -1)
        ends = [sync.end(header.number) for header in headers]
        self._recorder.end()
        segment.num_ended += num_ended
        # A device begins when the step before has ended: the host is ahead of it.
        begin_s = max(begin_s, self._times.value.end_s)
        worked = partial(self.executor.player.worked_s, portion)
        times = self._times = Late(
            partial(_seconds, worked, records, begin_s, perf_counter(), num_ended)
        )
        for header, (losses, status) in zip(headers, ends, strict=True):
            result = StepResult(
                header.number,
                header.num_samples,
                peak_bytes(self.executor.context.world.device),
                status,
                losses,
                times,
            )
            self._results.append(result)
            self.last_result = result

    def _order_of(self, num_steps: int) -> Schedule:
        schedule = self._plan.schedule
        if not self._plan.overlaps:
            return schedule
        if num_steps >= self._plan.num_steps:
            return schedule.with_num_steps(num_steps)
        alone = one_step(schedule).with_num_steps(num_steps)
        program = replace(schedule.program, num_steps=num_steps)
        return replace(alone, program=program)


def _seconds(
    worked: Callable[[OpTimes], tuple[float, float]],
    records: Sequence[OpTimes],
    begin_s: float,
    host_end_s: float,
    num_steps: int,
) -> StepSeconds:
    """Return how long each of some steps took that were played together.

    Args:
        worked: returns how long a lane worked, and when its last op had ended.
        records: when ops ran.
        begin_s: the moment at which the first one could begin.
        host_end_s: the moment at which the host had played the last one.
        num_steps: how many steps ended.
    """
    busy_s, ends_s = zip(*map(worked, records), strict=True)
    end_s = max(host_end_s, *ends_s)
    num_steps = max(1, num_steps)  # a prologue may end none
    return StepSeconds((end_s - begin_s) / num_steps, sum(busy_s) / num_steps, end_s)


def drains_after(every: int | Callable[[int], bool] | None) -> Callable[[int], bool]:
    """Return a function that says whether to drain after the step of a number.

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
