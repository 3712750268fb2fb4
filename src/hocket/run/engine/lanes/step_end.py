"""Reduce the gradients of a device's stages, and update their weights.

    F F B F B B  ──▶ complete ──▶ R ──▶ summed ──▶ U
            └ the last op that adds to a stage's gradients

Reductions end by themselves at any time: they are looked at between ops. Gradients that
are complete before an earlier step is updated wait for that update.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from hocket.run.data.step_batch import StepBatch
from hocket.run.diagnostics.flight_recorder import FlightRecorder
from hocket.run.engine.lanes.action import Playing
from hocket.run.engine.lanes.op_times import OpTimer
from hocket.run.engine.lanes.stage_ops import StageOps
from hocket.run.engine.sync.step_sync import NoSync
from hocket.run.stage.runner import StageRunner
from hocket.run.weights.follower import Follower
from hocket.run.weights.reduce import GradientSum
from hocket.run.weights.stale_ties.worker_ties import WorkerTies
from hocket.run.weights.updater import Updater


@dataclass(eq=False)
class StepEnd:
    """Plays ops R and U of one device.

    Args:
        runners: this device's stages.
        updaters: their updaters; none in evaluation.
        followers: the stages whose weights follow those of others.
        sync: called as a step's losses and gradients complete.
        ties: the weights that stages of different delays share.
        recorder: notes that waits are over.

    Attributes:
        reducing: the batches whose gradients are being reduced, by stage.
    """

    runners: Mapping[int, StageRunner]
    updaters: Mapping[int, Updater]
    followers: Mapping[int, Follower]
    sync: NoSync
    ties: WorkerTies
    recorder: FlightRecorder

    def __post_init__(self) -> None:
        """Begin without reductions."""
        self._has_ties = bool(self.ties)
        self._lock = threading.RLock()  # of the reductions
        self._order = threading.Lock()  # of completed gradients and updates
        self._timers: dict[int, OpTimer] = {}  # of R, by stage, as long as it is timed
        self._late: dict[int, OpTimer] = {}  # those of the portion before
        self.reducing: dict[int, StepBatch] = {}
        # What waits for an update of an earlier step, by stage.
        self._postponed: dict[int, deque[tuple[int, Callable[[], None]]]] = {}

    def end_backwards(self, ops: StageOps, work: StepBatch) -> None:
        """Called after the last op of a batch that adds to a stage's gradients.

        They move to `parameter.grad`, since the next step's gradients may begin to add
        up before this step's update.
        """
        if not work.ends_step:
            return
        stage = ops.number
        versions = self.runners[stage].versions
        if versions is not None:
            with ops.lock:
                versions.complete(work.step.number)
        self._when_next(stage, work, partial(self._complete, stage, work))

    def reduce(self, ops: StageOps, one: Playing) -> None:
        """Play R: begin the sum of a stage's gradients over replicas."""
        stage, work = ops.number, one.batch[ops.net]

        def start() -> None:
            reducer = self.updaters[stage].reducer
            assert reducer is not None
            one.timer.start()
            reducer.start()
            self._timers[stage] = one.timer
            self.reducing[stage] = work

        self._when_next(stage, work, start)

    def take_finished(self) -> None:
        """Finish the reductions that have ended."""
        if self.reducing:
            self._take(lambda reducer: reducer.is_done())

    def _take(self, is_taken: Callable[[GradientSum], bool]) -> None:
        over = []
        with self._lock:
            for stage, work in [*self.reducing.items()]:
                reducer = self.updaters[stage].reducer
                assert reducer is not None
                if is_taken(reducer):
                    self.finish(stage)
                    over.append((stage, work))
        # Without the lock: a gate that another lane has entered may call `finish`.
        for stage, work in over:
            self.sync.after_gradients(stage, work)

    def await_norms(self) -> bool:
        """Finish the reductions that have ended; return whether to call this again.

        A lane that waits for another device calls this, where norms are posted early:
        that device may wait for those of gradients whose reduction ends meanwhile.
        """
        self.take_finished()
        return bool(self.reducing)

    def finish(self, stage: int) -> None:
        """Wait for the sum of a stage's gradients, where it is under way."""
        with self._lock:
            self.updaters[stage].wait()
            self.reducing.pop(stage, None)
            if stage in self._timers:
                self._timers.pop(stage).end()
            elif stage in self._late:
                self._late.pop(stage).late_end()

    def end_record(self) -> bool:
        """End the times of reductions that go on after a portion, for the time being.

        They are corrected when the next portion ends (`late_end`).

        Returns:
            Whether any goes on.
        """
        self._late, self._timers = self._timers, {}
        for timer in self._late.values():
            timer.end()
        return bool(self._late)

    def judge(self, ops: StageOps, one: Playing) -> None:
        """Wait for the decision of the stage's gate, and leave it for `update`.

        Raises:
            NonFiniteError: a gradient is not finite.
            WaitError: another worker did not come to the gate.
        """
        stage, work = ops.number, one.batch[ops.net]
        if self.sync.posts_early:
            self._take(lambda reducer: True)
        decision = self.sync.before_update(stage, work, self.finish)
        self.recorder.resume()
        skips = not decision.updates
        for follower in self.followers.values():
            follower.before_update_of(stage, work.step.number, skips=skips)
        updater = self.updaters[stage]
        update = partial(updater.update, decision.is_bad)
        one.made = updater.forget if skips else update

    def update(self, ops: StageOps, one: Playing) -> None:
        """Play U, once the stage's gradients are judged."""
        self._change(ops, one.timer, one.made)
        self.ties.after_update(ops.number)
        for act in self._due(ops.number, one.batch[ops.net].step.number + 1):
            act()

    def follow(self, ops: StageOps, one: Playing) -> None:
        """Play U of a stage whose weights follow those of another one."""
        step = one.batch[ops.net].step.number
        update = partial(self.followers[ops.number].update, step)
        self._change(ops, one.timer, update)

    def _change(
        self, ops: StageOps, timer: OpTimer, change: Callable[[], None]
    ) -> None:
        """Change a stage's weights; steps that read older ones go on doing so."""
        versions = self.runners[ops.number].versions
        with ops.lock:
            timer.start()
            if versions is not None:
                versions.before_update()
            change()
            if versions is not None:
                versions.after_update()
            timer.end()

    def _when_next(self, stage: int, work: StepBatch, act: Callable[[], None]) -> None:
        """Act on a step's complete gradients, after the updates of earlier steps."""
        versions, number = self.runners[stage].versions, work.step.number
        with self._order:
            if versions is not None and not versions.is_next(number):
                self._postponed.setdefault(stage, deque()).append((number, act))
                return
        act()

    def _due(self, stage: int, number: int) -> list[Callable[[], None]]:
        """Take the actions that waited for the update before step `number`."""
        found: list[Callable[[], None]] = []
        with self._order:
            postponed = self._postponed.get(stage)
            while postponed and postponed[0][0] <= number:
                found.append(postponed.popleft()[1])
        return found

    def _complete(self, stage: int, work: StepBatch) -> None:
        if self._has_ties:
            self.ties.complete(stage, work.step.number)
            self.recorder.resume()
        if stage in self.updaters:
            self.updaters[stage].take_gradients()
        self.sync.after_backwards(stage, work)
        if stage in self.updaters and self.updaters[stage].reducer is None:
            self.sync.after_gradients(stage, work)
