"""Play one device's lane: receive, compute, send, in the schedule's order.

For each op:

    wait for its inputs │ compute (the op's span) │ hand over what it made
     Handover.take      │  StageRunner, Updater   │  Handover.give
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import Final

import numpy as np
from torch import Tensor

from hocket.core.op import ASYNCHRONOUS, Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.run.data.step_batch import Work
from hocket.run.device.stopwatch import Seconds, make_stopwatch
from hocket.run.diagnostics.flight_recorder import Ring
from hocket.run.engine.handover import Handover, Left
from hocket.run.engine.hooks import Hooks
from hocket.run.engine.point_to_point import Mail
from hocket.run.stage.runner import StageRunner
from hocket.run.stage.split.splitter import Remainder
from hocket.run.weights.updater import Updater


@dataclass(frozen=True, slots=True)
class Record:
    """When each op of the lane ran, in this process's seconds; 0 if it did not."""

    start_s: Seconds
    end_s: Seconds


_ENDS: Final = frozenset({Kind.REDUCE, Kind.UPDATE})  # what ends a step


@dataclass(frozen=True, slots=True)
class _Waiting:
    """What I has left for W.

    Args:
        left: to do.
        late: by which ways messages have come that W still reads.
    """

    left: Remainder
    late: tuple[Handover, ...]


@dataclass(frozen=True, slots=True)
class StageOfLane:
    """One stage of the lane, with the ways into and out of it.

    Args:
        runner: computes it.
        outputs: from the stages before, to those after.
        gradients: the other way.
        keeps: whether its input is needed until its backward.
        is_last: whether no other stage reads what it makes.
        received: what forwards were given whose backward comes in two halves.
        waiting: the second halves, by microbatch.
    """

    runner: StageRunner
    outputs: Handover
    gradients: Handover
    keeps: bool
    is_last: bool
    received: dict[int, Sequence[Tensor]] = field(default_factory=dict)
    waiting: dict[int, _Waiting] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turn:
    """One op of the lane.

    Args:
        op: for errors.
        text: for the ring.
        action: plays it.
    """

    op: Op
    text: str
    action: Callable[[Work], None]


class Worker:
    """Plays the lane of one device, one step at a time.

    All that an op needs is looked up here, once. To play it is to call its action.

    Args:
        schedule: the order of one step.
        device: whose lane.
        runners: this device's stages.
        updaters: likewise; none in evaluation.
        mail: to and from the other devices.
        ring: told of each op, for the report of a failure.
        hooks: what else happens at some points of the lane.
        evaluates: forwards keep nothing, and nothing is updated.
        prefix: of what the ring is told.
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
        *,
        evaluates: bool = False,
        prefix: str = "",
    ) -> None:
        (self.lane,) = (lane for lane in schedule.lanes if lane.device == device)
        self._updaters = updaters
        self._mail = mail
        self._ring = ring
        self._hooks = hooks
        self._evaluates = evaluates
        self._updates = True
        ops = self.lane.ops
        (place,) = {runner.device for runner in runners.values()}
        self._watch = make_stopwatch(len(ops), place)
        self._computes = np.array([op.kind not in ASYNCHRONOUS for op in ops])
        left: Left = {}
        self._stages = {
            number: self._stage(number, runner, schedule.program, left)
            for number, runner in runners.items()
        }
        self._reductions = [i for i, op in enumerate(ops) if op.kind is Kind.REDUCE]
        updates = [i for i, op in enumerate(ops) if op.kind is Kind.UPDATE]
        self._first_update = min(updates, default=-1)
        self._last_loss = next(
            (
                (op.stage, op.microbatch)
                for op in reversed(ops)
                if op.kind is Kind.FORWARD and self._stages[op.stage].is_last
            ),
            None,
        )
        self._prefix = prefix
        self._split = frozenset(
            (op.stage, op.microbatch) for op in ops if op.kind is Kind.BACKWARD_INPUT
        )
        turns = [self._turn(i, op) for i, op in enumerate(ops)]
        without_ends = [turn for turn in turns if turn.op.kind not in _ENDS]
        self._turns = {True: turns, False: without_ends}  # by whether a batch closes

    def play(self, work: Work) -> Record:
        """Do one batch's work; what ends a step, only where the batch closes it.

        Raises:
            RunError: of whatever kind went wrong.
        """
        self._ring.begin(f"{self._prefix}begin", work.step.number)
        self._mail.begin(work.step)
        self._ring.end()
        self._play(zip(self._turns[work.closes], repeat(work)))
        self._end_without_update(work)
        self._mail.flush()
        return Record(*self._watch.read())

    def _play(self, turns: Iterable[tuple[Turn, Work]]) -> None:
        ring = self._ring
        for turn, work in turns:
            number = work.step.number
            ring.begin(turn.text, number)
            try:
                turn.action(work)
            except Exception as error:
                self._hooks.on_error(turn.op, number, error)
                raise
            ring.end()

    def busy_s(self, record: Record) -> float:
        """How long the lane itself worked in what `play` gave."""
        return float((record.end_s - record.start_s)[self._computes].sum())

    def _end_without_update(self, work: Work) -> None:
        """All workers judge the gradients together, also those that have none."""
        if work.closes and self._first_update < 0 and not self._evaluates:
            self._ring.begin("end", work.step.number)
            self._hooks.before_updates()
            self._ring.end()

    def _stage(
        self, number: int, runner: StageRunner, program: Program, left: Left
    ) -> StageOfLane:
        keeps = program.stages[number].trainable and not self._evaluates
        outputs, gradients = (
            Handover(kind, number, program, self._mail, left, self._ring, keeps=keeps)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
        )
        is_last = not program.targets[number]
        return StageOfLane(runner, outputs, gradients, keeps, is_last)

    def _turn(self, i: int, op: Op) -> Turn:
        return Turn(op, f"{self._prefix}{replace(op, step=0)}", self._action(i, op))

    def _action(self, i: int, op: Op) -> Callable[[Work], None]:
        match op:
            case Op(kind=Kind.FORWARD, microbatch=int(index)):
                return self._forward_action(i, op, index)
            case Op(kind=Kind.BACKWARD, microbatch=int(index)):
                return partial(self._backward, i, self._stages[op.stage], index)
            case Op(kind=Kind.BACKWARD_INPUT, microbatch=int(index)):
                return partial(self._input_grads, i, self._stages[op.stage], index)
            case Op(kind=Kind.BACKWARD_WEIGHT, microbatch=int(index)):
                return partial(self._weight_grads, i, self._stages[op.stage], index)
            case Op(kind=Kind.REDUCE):
                return partial(self._reduce, i, op.stage)
            case Op(kind=Kind.UPDATE):
                return partial(self._update, i, op.stage)
            case _:
                raise AssertionError(f"{op}: make_order refuses what is not played")

    def _forward_action(self, i: int, op: Op, index: int) -> Callable[[Work], None]:
        """It depends on what will follow: a backward, its first half, or neither."""
        stage = self._stages[op.stage]
        if self._evaluates:
            return partial(self._evaluate, i, stage, index)
        splits = (op.stage, index) in self._split
        is_last = (op.stage, index) == self._last_loss
        return partial(self._forward, i, stage, index, splits=splits, is_last=is_last)

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
        step = work.step
        received = stage.outputs.take(step, index)
        if splits:
            stage.received[index] = received
        self._watch.start(i)
        values = stage.runner.forward(
            step.number,
            work.number(index),
            work.microbatches[index],
            received,
            work.share(index) * work.loss_scale,
            splits=splits,
        )
        self._watch.end(i)
        stage.outputs.give(step, index, values)
        if is_last:
            self._hooks.after_losses(work)
        if not stage.keeps:
            stage.outputs.release(step, index)  # no backward will do so

    def _evaluate(self, i: int, stage: StageOfLane, index: int, work: Work) -> None:
        received = stage.outputs.take(work.step, index)
        microbatch = work.microbatches[index]
        self._watch.start(i)
        values = stage.runner.evaluate(microbatch, received)
        self._watch.end(i)
        if not stage.is_last:
            stage.outputs.give(work.step, index, values)
        elif self._hooks.on_output is not None:
            self._hooks.on_output(microbatch, values)
        stage.outputs.release(work.step, index)

    def _backward(self, i: int, stage: StageOfLane, index: int, work: Work) -> None:
        step = work.step
        grads = stage.gradients.take(step, index)
        self._watch.start(i)
        values = stage.runner.backward(step.number, work.number(index), grads)
        self._watch.end(i)
        stage.gradients.release(step, index)
        stage.gradients.give(step, index, values)
        stage.outputs.release(step, index)

    def _input_grads(self, i: int, stage: StageOfLane, index: int, work: Work) -> None:
        step = work.step
        grads = stage.gradients.take(step, index)
        self._watch.start(i)
        values, left = stage.runner.input_gradients(
            step.number, work.number(index), grads
        )
        self._watch.end(i)
        stage.gradients.give(step, index, values)
        messages = (stage.gradients, grads), (stage.outputs, stage.received.pop(index))
        late = tuple(way for way, held in messages if way.receives and left.holds(held))
        for way, _ in messages:
            if way not in late:
                way.release(step, index)
        stage.waiting[index] = _Waiting(left, late)

    def _weight_grads(self, i: int, stage: StageOfLane, index: int, work: Work) -> None:
        waiting = stage.waiting.pop(index)
        self._watch.start(i)
        waiting.left.finish()
        self._watch.end(i)
        for way in waiting.late:
            way.release(work.step, index)

    def _reduce(self, i: int, stage: int, _: Work) -> None:
        reducer = self._updaters[stage].reducer
        assert reducer is not None
        self._watch.start(i)
        reducer.start()

    def _update(self, i: int, stage: int, _: Work) -> None:
        updater = self._updaters[stage]
        if i == self._first_update:
            self._finish_reductions()
            self._updates = self._hooks.before_updates()
            self._ring.resume()
        self._watch.start(i)
        if self._updates:
            updater.update()
        else:
            updater.forget()
        self._watch.end(i)

    def _finish_reductions(self) -> None:
        """Only whoever waits for a reduction learns that it has ended."""
        for i in self._reductions:
            self._updaters[self.lane.ops[i].stage].wait()
            self._watch.end(i)
