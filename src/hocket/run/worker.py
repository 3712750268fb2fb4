"""Play one device's lane: receive, compute, send, in the schedule's order.

For each op:

    wait for its inputs │ compute (the op's span) │ hand over what it made
     mail.receive       │  StageRunner, Updater    │  mail.send, or kept for the
                                                   │  stage on the same device
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hocket.plan.op import Kind, Op
from hocket.plan.schedule import Schedule
from hocket.run.batch import Microbatch
from hocket.run.post import Post
from hocket.run.ring import Ring
from hocket.run.stage import StageRunner
from hocket.run.update import Updater
from hocket.run.work import Work


@dataclass(frozen=True, slots=True)
class Record:
    """When each op of the lane ran, in this process's seconds."""

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]


_ENDS: Final = frozenset({Kind.REDUCE, Kind.UPDATE})  # what ends a step


def _nothing() -> None:
    """What a hook does when nobody set it."""


def _yes() -> bool:
    """What the other one does."""
    return True


def _ignore(op: Op, step: int, error: Exception) -> None:
    """What the third one does."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """What else happens at some points of the lane.

    Args:
        after_losses: when the last stage's last forward has run.
        before_updates: when the lane comes to its first update; whether the step's
            updates are to be made.
        on_output: evaluation: called with each microbatch and the model's output.
        on_error: when an op has failed, with its step; may raise a better error.
    """

    after_losses: Callable[[], None] = _nothing
    before_updates: Callable[[], bool] = _yes
    on_output: Callable[[Microbatch, object], None] | None = None
    on_error: Callable[[Op, int, Exception], None] = _ignore


class Worker:
    """Plays the lane of one device, one step at a time.

    Args:
        schedule: the order of one step.
        device: whose lane.
        runners: this device's stages.
        updaters: likewise; none in evaluation.
        mail: to and from the other devices.
        ring: told of each op, for the report of a failure.
        hooks: what else happens at some points of the lane.
        evaluates: forwards keep nothing, and nothing is updated.
    """

    def __init__(
        self,
        schedule: Schedule,
        device: int,
        runners: Mapping[int, StageRunner],
        updaters: Mapping[int, Updater],
        mail: Post,
        ring: Ring,
        hooks: Hooks,
        *,
        evaluates: bool = False,
    ) -> None:
        (self.lane,) = (lane for lane in schedule.lanes if lane.device == device)
        self._program = schedule.program
        self._runners = runners
        self._updaters = updaters
        self._mail = mail
        self._ring = ring
        self._hooks = hooks
        self._evaluates = evaluates
        self._local: dict[tuple[Kind, int, int], tuple[Tensor, ...]] = {}
        self._work: Work | None = None
        self._start_s = [0.0] * len(self.lane.ops)
        self._end_s = [0.0] * len(self.lane.ops)
        kinds = [op.kind for op in self.lane.ops]
        self._last_forward = _last(kinds, Kind.FORWARD)
        self._first_update = kinds.index(Kind.UPDATE) if Kind.UPDATE in kinds else -1
        self._reductions = {
            op.stage: i for i, op in enumerate(self.lane.ops) if op.kind is Kind.REDUCE
        }
        self._prefix = "eval " if evaluates else ""  # in the ring
        self._actions = [
            (f"{self._prefix}{op}", self._action(i, op))
            for i, op in enumerate(self.lane.ops)
        ]
        self._updates = True

    def play(self, work: Work) -> Record:
        """Do one batch's work; what ends a step, only where the batch closes it.

        Raises:
            RunError: of whatever kind went wrong.
        """
        self._work = work
        ring, number = self._ring, work.step.number
        ring.begin(f"{self._prefix}begin", number)
        self._mail.begin(work.step)
        ring.end()
        i = 0
        try:
            for i, (text, action) in enumerate(self._actions):
                if not work.closes and self.lane.ops[i].kind in _ENDS:
                    self._start_s[i] = self._end_s[i] = 0.0
                    continue
                ring.begin(text, number)
                action()
                ring.end()
            self._end_without_update(work)
        except Exception as error:
            self._hooks.on_error(self.lane.ops[i], number, error)
            raise
        self._mail.flush()
        return Record(np.array(self._start_s), np.array(self._end_s))

    def _end_without_update(self, work: Work) -> None:
        """All workers judge the gradients together, also those that have none."""
        if work.closes and self._first_update < 0 and not self._evaluates:
            self._ring.begin("end", work.step.number)
            self._hooks.before_updates()
            self._ring.end()

    def _action(self, i: int, op: Op) -> Callable[[], None]:
        match op.kind:
            case Kind.FORWARD:
                run = self._evaluate if self._evaluates else self._forward
                return partial(run, i, op)
            case Kind.BACKWARD:
                return partial(self._backward, i, op)
            case Kind.REDUCE:
                return partial(self._reduce, i, op)
            case Kind.UPDATE:
                return partial(self._update, i, op)
            case _:
                raise AssertionError(f"{op}: make_order refuses what is not played")

    def _forward(self, i: int, op: Op) -> None:
        work, index = self._now(op)
        received = self._inputs(Kind.FORWARD, op.stage, index)
        microbatch = work.microbatches[index]
        self._start_s[i] = perf_counter()
        values = self._runners[op.stage].forward(
            work.step.number,
            work.number(index),
            microbatch,
            received,
            work.share(index) * work.loss_scale,
        )
        self._end_s[i] = perf_counter()
        if self._program.targets[op.stage]:
            self._hand_over(Kind.FORWARD, op.stage, index, values)
        elif i == self._last_forward:
            self._hooks.after_losses()
        if not self._program.stages[op.stage].trainable:
            self._release(Kind.FORWARD, op.stage, index)  # no backward will do so

    def _evaluate(self, i: int, op: Op) -> None:
        work, index = self._now(op)
        received = self._inputs(Kind.FORWARD, op.stage, index)
        microbatch = work.microbatches[index]
        self._start_s[i] = perf_counter()
        values = self._runners[op.stage].evaluate(microbatch, received)
        self._end_s[i] = perf_counter()
        if self._program.targets[op.stage]:
            self._hand_over(Kind.FORWARD, op.stage, index, values)
        elif self._hooks.on_output is not None:
            self._hooks.on_output(microbatch, values)
        self._release(Kind.FORWARD, op.stage, index)

    def _backward(self, i: int, op: Op) -> None:
        work, index = self._now(op)
        grads = self._inputs(Kind.BACKWARD, op.stage, index)
        self._start_s[i] = perf_counter()
        runner = self._runners[op.stage]
        values = runner.backward(work.step.number, work.number(index), grads)
        self._end_s[i] = perf_counter()
        self._release(Kind.BACKWARD, op.stage, index)
        if any(
            self._program.stages[s].trainable for s in self._program.sources[op.stage]
        ):
            self._hand_over(Kind.BACKWARD, op.stage, index, values)
        self._release(Kind.FORWARD, op.stage, index)

    def _reduce(self, i: int, op: Op) -> None:
        self._start_s[i] = perf_counter()
        reducer = self._updaters[op.stage].reducer
        assert reducer is not None
        reducer.start()
        self._end_s[i] = perf_counter()

    def _update(self, i: int, op: Op) -> None:
        if i == self._first_update:
            self._updates = self._hooks.before_updates()
        updater = self._updaters[op.stage]
        updater.wait()
        self._ring.resume()
        if op.stage in self._reductions:  # known to have ended only now
            assert updater.reducer is not None
            self._end_s[self._reductions[op.stage]] = updater.reducer.ended_s
        self._start_s[i] = perf_counter()
        if self._updates:
            updater.update()
        else:
            updater.forget()
        self._end_s[i] = perf_counter()

    def _now(self, op: Op) -> tuple[Work, int]:
        assert self._work is not None
        assert op.microbatch is not None
        return self._work, op.microbatch

    def _inputs(self, kind: Kind, stage: int, index: int) -> Sequence[Tensor]:
        """What the stages before (F) or after (B) made for this one."""
        assert self._work is not None
        if self._mail.receives(kind, stage):
            values = self._mail.receive(kind, stage, self._work.step, index)
            self._ring.resume()
            return values
        return self._local.pop((kind, stage, index), ())

    def _hand_over(
        self, kind: Kind, stage: int, index: int, values: tuple[Tensor, ...]
    ) -> None:
        assert self._work is not None
        if self._mail.sends(kind, stage):
            self._mail.send(kind, stage, self._work.step, index, values)
            return
        neighbours = (
            self._program.targets if kind is Kind.FORWARD else self._program.sources
        )
        if self._gives_back_at_once(kind, stage):
            values = tuple(value.clone() for value in values)
        for neighbour in neighbours[stage]:
            self._local[kind, neighbour, index] = values

    def _gives_back_at_once(self, kind: Kind, stage: int) -> bool:
        """Whether a stage's input goes back to the mail as soon as its op has ended.

        What it only hands on lies in that input.
        """
        keeps = self._program.stages[stage].trainable and not self._evaluates
        return not keeps and self._mail.receives(kind, stage)

    def _release(self, kind: Kind, stage: int, index: int) -> None:
        assert self._work is not None
        if self._mail.receives(kind, stage):
            self._mail.release(kind, stage, self._work.step, index)


def _last(kinds: list[Kind], kind: Kind) -> int:
    return max((i for i, other in enumerate(kinds) if other is kind), default=-1)
