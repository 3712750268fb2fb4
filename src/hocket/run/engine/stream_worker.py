"""Play one device's lane of an order in which several steps are in flight.

    portion    opening              again           again           closing
    lane       F F F B U            F B U           F B U           B U B U
    step       0 1 2 0 0            3 1 1           4 2 2           3 3 4 4

Steps that are too few for the order are played one at a time: with the same weights,
for which version a step reads does not depend on what else is in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from hocket.core.op import ASYNCHRONOUS, Op
from hocket.core.portions import portions
from hocket.core.schedule import Schedule
from hocket.passes.one_step import one_step
from hocket.run.data.step_batch import Work
from hocket.run.device.stopwatch import Stopwatch, make_stopwatch
from hocket.run.diagnostics.flight_recorder import Ring
from hocket.run.engine.hooks import Hooks
from hocket.run.engine.point_to_point import Mail
from hocket.run.engine.worker import Record, StageOfLane, Turn, Worker
from hocket.run.stage.runner import StageRunner
from hocket.run.weights.stale_ties.loans import Loans
from hocket.run.weights.updater import Updater


class Portion(Enum):
    """What is played at a time."""

    OPENING = "opening"
    AGAIN = "again"
    CLOSING = "closing"
    ALONE = "alone"


@dataclass(frozen=True, slots=True)
class _Played:
    """A portion of this lane, ready to play.

    Args:
        turns: its ops; their steps count from that which the portion is told.
        watch: takes their times.
        computes: which of them take the lane's own time.
    """

    turns: list[Turn]
    watch: Stopwatch
    computes: NDArray[np.bool_]


class StreamWorker(Worker):
    """Plays the lane of one device, portion by portion.

    Args:
        schedule: of several steps, with a body.
        device: whose lane.
        runners: this device's stages.
        updaters: likewise.
        mail: to and from the other devices.
        ring: told of each op.
        hooks: what else happens at some points of the lane.
        loans: the weights that stages of different delays share.

    Attributes:
        num_steps: that an opening begins.
        num_ended: of them, those that are over everywhere when it is.
    """

    def __init__(
        self,
        schedule: Schedule,
        device: int,
        runners: Mapping[int, StageRunner],
        updaters: Mapping[int, Updater],
        mail: Mail,
        ring: Ring,
        hooks: Hooks,
        loans: Loans,
    ) -> None:
        self._loans = loans
        super().__init__(
            one_step(schedule), device, runners, updaters, mail, ring, hooks
        )
        (number,) = schedule.lanes_of(device)
        parts = portions(schedule)
        self.num_steps: Final = parts.num_steps
        self.num_ended: Final = parts.num_ended
        (place,) = {runner.device for runner in runners.values()}
        self._portions = {
            Portion.OPENING: self._ready(parts.opening[number], place),
            Portion.AGAIN: self._ready(parts.again[number], place),
            Portion.CLOSING: self._ready(parts.closing[number], place),
            Portion.ALONE: _Played(self._turns[True], self._watch, self._computes),
        }
        self._reducing: dict[int, int] = {}  # stage: where its reduction began
        self._unfinished: dict[int, Work] = {}  # stage: the step whose sum is under way
        self._num_left: dict[tuple[int, int], int] = {}  # backwards of a stage and step

    def play_portion(
        self,
        portion: Portion,
        first: int,
        works: Mapping[int, Work],
        begun: Sequence[Work],
    ) -> Record:
        """Play a portion.

        Args:
            portion: which.
            first: the step that its step 0 is.
            works: all that are in flight, by step.
            begun: of these, those that begin here, in order.

        Raises:
            RunError: of whatever kind went wrong.
        """
        ready = self._portions[portion]
        self._watch = ready.watch
        for work in begun:
            self._ring.begin("begin", work.step.number)
            self._mail.begin(work.step, overlaps=True)
            self._ring.end()
        try:
            self._play(self._with_works(ready.turns, first, works))
        finally:
            for stage in self._stages.values():
                if stage.runner.versions is not None:
                    stage.runner.versions.take_out()
        if portion is not Portion.AGAIN:
            self._mail.flush()
        if portion in (Portion.CLOSING, Portion.ALONE):
            self._loans.settle()
        for i in self._reducing.values():  # they go on, but here the record ends
            self._watch.end(i)
        self._reducing.clear()
        return Record(*self._watch.read())

    def _with_works(
        self, turns: Iterable[Turn], first: int, works: Mapping[int, Work]
    ) -> Iterator[tuple[Turn, Work]]:
        for turn in turns:
            yield turn, works[first + turn.op.step]
            if self._unfinished:
                self._look_after_sums()

    def busy_in(self, portion: Portion, record: Record) -> float:
        """How long the lane itself worked in what `play_portion` gave."""
        lasted = record.end_s - record.start_s
        return float(lasted[self._portions[portion].computes].sum())

    def _ready(self, ops: Sequence[Op], place: torch.device) -> _Played:
        turns = [self._turn(i, op) for i, op in enumerate(ops)]
        computes = np.array([op.kind not in ASYNCHRONOUS for op in ops], dtype=bool)
        return _Played(turns, make_stopwatch(len(ops), place), computes)

    def _forward(
        self,
        i: int,
        stage: StageOfLane,
        index: int,
        work: Work,
        *,
        splits: bool,
        is_last: bool,
    ) -> None:
        if self._loans:
            self._loans.before_forward(stage.runner.number, work.step.number)
            self._ring.resume()
        super()._forward(i, stage, index, work, splits=splits, is_last=is_last)

    def _backward(self, i: int, stage: StageOfLane, index: int, work: Work) -> None:
        if self._loans:
            self._loans.before_backward(stage.runner.number, work.step.number)
        super()._backward(i, stage, index, work)
        key = stage.runner.number, work.step.number
        num_left = self._num_left.pop(key, len(work.microbatches)) - 1
        if num_left:
            self._num_left[key] = num_left
        else:
            self._complete(stage.runner.number, work)

    def _complete(self, stage: int, work: Work) -> None:
        """Have a step's gradients where the optimizer looks for them.

        The next step's may begin before the update, with other weights or the same.
        """
        versions = self._stages[stage].runner.versions
        if versions is not None:
            versions.complete(work.step.number)
        self._loans.complete(stage, work.step.number)
        self._ring.resume()
        self._hooks.after_backwards(stage, work)
        if self._updaters[stage].reducer is None:
            self._hooks.after_gradients(stage, work)

    def _reduce(self, i: int, stage: int, work: Work) -> None:
        super()._reduce(i, stage, work)
        self._reducing[stage] = i
        self._unfinished[stage] = work

    def _look_after_sums(self) -> None:
        """Reductions end by themselves, at any time."""
        for stage, work in [*self._unfinished.items()]:
            reducer = self._updaters[stage].reducer
            assert reducer is not None
            if reducer.is_done():
                self._finish(stage)
                self._hooks.after_gradients(stage, work)

    def _finish(self, stage: int) -> None:
        """Wait for the sum of a stage's gradients, where it is under way."""
        self._updaters[stage].wait()
        self._unfinished.pop(stage, None)
        if stage in self._reducing:
            self._watch.end(self._reducing.pop(stage))

    def _update(self, i: int, stage: int, work: Work) -> None:
        """Each stage by itself: other stages' gradients may be far from complete."""
        updater = self._updaters[stage]
        self._finish(stage)
        self._hooks.before_update(stage, work)
        self._ring.resume()
        versions = self._stages[stage].runner.versions
        self._watch.start(i)
        if versions is not None:
            versions.before_update()
        updater.update()
        if versions is not None:
            versions.after_update()
        self._watch.end(i)
        self._loans.after_update(stage)
