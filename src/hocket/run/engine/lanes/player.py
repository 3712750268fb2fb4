"""Play the lanes of one device: receive, compute, send, in the schedule's order.

Each op of a lane becomes a `LaneOp`, looked up once. To play it:

    take its inputs │ compute (the op's span) │ put what it made │ release its inputs
     Input.take     │  StageRunner, Updater   │  Output.put      │  Input.release

What comes from where, and goes where, follows from `hocket.core.dataflow` by way of
`hocket.core.plans.lane_plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from hocket.core.op import ASYNCHRONOUS, STEP_ENDS, Kind, Op
from hocket.core.plans.lane_plan import OpPlan
from hocket.run.data.batch import Microbatch
from hocket.run.data.step_batch import Batches, NetBatches, first_of
from hocket.run.device.device import Device
from hocket.run.device.late import Late
from hocket.run.device.stopwatch import Times, make_stopwatch
from hocket.run.diagnostics.flight_recorder import FlightRecorder
from hocket.run.engine.lanes.concurrent_lanes import (
    ConcurrentLanes,
    Countdown,
    LaneOp,
    LaneOps,
)
from hocket.run.engine.lanes.op_times import OpTimer, OpTimes
from hocket.run.engine.lanes.play_plan import PlayPlan, Portion
from hocket.run.engine.lanes.point_to_point import PointToPoint
from hocket.run.engine.lanes.ports import InputMaker
from hocket.run.engine.lanes.stage_ops import StageOps
from hocket.run.engine.lanes.step_end import StepEnd
from hocket.run.engine.lanes.wiring import Wiring
from hocket.run.engine.sync.step_sync import NoSync
from hocket.run.stage.runner import StageRunner
from hocket.run.weights.follower import Follower
from hocket.run.weights.stale_ties.worker_ties import WorkerTies
from hocket.run.weights.updater import Updater

Action: TypeAlias = Callable[[NetBatches], None]
Exchange: TypeAlias = Callable[[int, int], None]  # of a stage, in a step
OnError: TypeAlias = Callable[[Op, int, Exception], None]
_NO_STAGE: Final = -1  # of what is no op of the order
OnOutput: TypeAlias = Callable[[Microbatch, Any, Sequence[Any]], None]


@dataclass(eq=False)
class Player:
    """Plays the lanes of one device, portion by portion.

    Args:
        plan: what is played.
        device: this worker's.
        runners: this device's stages.
        updaters: the stages' updaters; none in evaluation.
        channels: messages to and from other devices.
        recorder: notes each op, for the report of a failure.
        sync: called as losses and gradients complete; none where nothing is updated.
        ties: the weights that stages of different delays share.
        on_output: evaluation: called with each microbatch, the model's output, and
            those of other nets that the loss reads.
        on_error: called when an op has failed, with its step; may raise a better error.
        evaluates: forwards keep nothing.
        prefix: begins what the flight recorder notes.
        lanes: the device's lanes, where it has several.
        wiring: which values go along each flow; all along every flow when not given.
        followers: the stages whose weights follow those of others (as in MoCo and
            BYOL).

    Attributes:
        maker: makes the inputs and outputs of stages.
        stages: plays the ops of each stage of this device.
    """

    plan: PlayPlan
    device: int
    runners: Mapping[int, StageRunner]
    updaters: Mapping[int, Updater]
    channels: PointToPoint
    recorder: FlightRecorder
    sync: NoSync = field(default_factory=NoSync)
    ties: WorkerTies = field(default_factory=lambda: WorkerTies((), {}, {}, ()))
    on_output: OnOutput | None = None
    on_error: OnError | None = None
    evaluates: bool = False
    prefix: str = ""
    lanes: Device | None = None
    wiring: Wiring = field(default_factory=Wiring)
    followers: Mapping[int, Follower] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Look up what each op needs."""
        # The followers that read the buffers of a stage, by its number.
        self._buffer_readers = {
            stage: [x for x in self.followers.values() if stage in x.buffer_stages]
            for stage in self.runners
        }
        self._has_ties = bool(self.ties)
        numbers = self.plan.schedule.lanes_of(self.device)
        (place,) = {runner.device for runner in self.runners.values()}
        # Ops of several lanes overlap: none may change what the newest op notes.
        notes = self.recorder if self.lanes is None else FlightRecorder()
        self._notes = notes
        program, wiring, lanes = self.plan.program, self.wiring, self.lanes
        self.maker = InputMaker(
            program, wiring, self.device, self.channels, notes, lanes=lanes
        )
        self.stages = {
            number: StageOps(
                number, runner, program, wiring, self.maker, evaluates=self.evaluates
            )
            for number, runner in self.runners.items()
        }
        if lanes is not None:
            for stage in self.stages.values():
                stage.share_between_lanes(lanes, numbers)
        self._end = StepEnd(
            self.runners, self.updaters, self.followers, self.sync, self.ties, notes
        )
        if self.sync.posts_early and any(x.reducer for x in self.updaters.values()):
            self.channels.do_meanwhile(self._end.await_norms)
        self._last: tuple[Portion, OpTimes] | None = None  # where R goes on after it
        self._num_forwards, self._num_gradients = Countdown(), Countdown()
        # Stages and microbatches whose backward is I and W in some portion. Where it is
        # B, it is played as I and W, too.
        self._split = frozenset(
            (one.op.stage, one.op.microbatch)
            for part in self.plan.portions.values()
            for number in numbers
            for one in part.lanes[number]
            if one.op.kind is Kind.BACKWARD_INPUT
        )
        self._parts = {
            portion: [
                self._lane(number, part.lanes[number], part.shift, place)
                for number in numbers
            ]
            for portion, part in self.plan.portions.items()
        }
        self._orders = {
            portion: self.channels.orders_of(part)
            for portion, part in self.plan.portions.items()
        }
        self._concurrent: ConcurrentLanes | None = None
        if lanes is not None:
            self._concurrent = ConcurrentLanes(
                lanes, self.plan, numbers, self._parts, self._play_op, self.recorder
            )

    @property
    def takes_others(self) -> bool:
        """Whether `insert` may be called: one lane, whose steps do not overlap."""
        return self._concurrent is None and {*self._parts} == {Portion.STEP}

    def insert(self, num_before: int, text: str, act: Callable[[], None]) -> None:
        """Do something else in every step, behind so many ops of the lane's order.

        It takes part in no message. Insert what is later first.

        Args:
            num_before: the lane's own ops before it.
            text: what the flight recorder notes.
            act: does it.
        """
        (lane,) = self._parts[Portion.STEP]
        op = Op(Kind.FORWARD, _NO_STAGE, 0)
        other = LaneOp(op, text, lambda _: act(), (), (), is_step_end=False)
        lane.ops.insert(num_before, other)

    def begin(self, batches: NetBatches) -> None:
        """Begin a batch of each net: its header goes before its first messages."""
        steps = {net: work.step for net, work in batches.items()}
        number = next(iter(steps.values())).number
        self.recorder.begin(f"{self.prefix}begin", number)
        self.channels.begin(steps)
        self.recorder.end()

    def play(self, portion: Portion, first: int, batches: Batches) -> OpTimes:
        """Play a portion.

        Args:
            portion: the portion.
            first: the step that its step 0 is.
            batches: all batches under way, by number and net: that of their step, or
                of the batch where steps have several. One that does not end its step
                is played without reductions and updates.

        Raises:
            RunError: something went wrong.
        """
        self.channels.expect(self._orders[portion], first, batches)
        lanes = self._parts[portion]
        try:
            if self._concurrent is None:
                self._play_lane(lanes[0], first, batches)
            else:
                self._concurrent.play(portion, first, batches)
        finally:
            for runner in self.runners.values():
                if runner.versions is not None:
                    runner.versions.take_out()
        self.channels.end_portion()
        if portion is Portion.STEP:
            self.sync.close(batches[first], self._end.finish)
        if portion is not Portion.BODY:
            self.channels.flush()
        if portion in (Portion.EPILOGUE, Portion.STEP):
            self.ties.receive_pending()
        self._end.end_record()
        return self._read_times(portion)

    def _read_times(self, portion: Portion) -> OpTimes:
        """Return a portion's times; correct those of the one before where R went on."""
        times = {portion: [lane.watch.read() for lane in self._parts[portion]]}
        if self._last is not None:
            before, record = self._last
            if before not in times:
                times[before] = [lane.watch.read() for lane in self._parts[before]]
            ends = [late.value[1] for late in times[before]]
            record.take_late_ends([end_s[len(end_s) // 2 :] for end_s in ends])
        num_ops = sum(len(lane.computes) for lane in self._parts[portion])
        made = OpTimes(Late(partial(_without_late_ends, times[portion])), num_ops)
        self._last = (portion, made) if self._end.goes_on else None
        return made

    def worked_s(self, portion: Portion, record: OpTimes) -> tuple[float, float]:
        """See `PortionPlayer.worked_s`: the mean over lanes, and the last one's end."""
        times = zip(self._parts[portion], record.times.value, strict=True)
        worked = [lane.worked_s(*of_lane) for lane, of_lane in times]
        return fmean(busy_s for busy_s, _ in worked), max(end_s for _, end_s in worked)

    def _play_lane(self, lane: LaneOps, first: int, batches: Batches) -> None:
        recorder, end = self.recorder, self._end
        steps = {number: first_of(nets) for number, nets in batches.items()}
        for lane_op in lane.ops:
            place = first + lane_op.op.step
            work = steps[place]
            if lane_op.is_step_end and not work.ends_step:
                continue
            number = work.step.number
            recorder.begin(lane_op.text, number)
            try:
                if lane_op.is_step_end:
                    self.channels.begin_step_end()
                lane_op.action(batches[place])
                if end.reducing:
                    end.take_finished()
            except Exception as error:
                self._report(lane_op, number, error)
                raise
            recorder.end()

    def _play_op(
        self, lane_op: LaneOp, place: int, batches: Batches, lane: int
    ) -> None:
        """Play one op of several lanes."""
        number = first_of(batches[place]).step.number
        try:
            lane_op.action(batches[place])
            if not lane and self._end.reducing:
                self._end.take_finished()
        except Exception as error:
            self._report(lane_op, number, error)
            raise

    def _report(self, lane_op: LaneOp, number: int, error: Exception) -> None:
        if self.on_error is not None and lane_op.op.stage != _NO_STAGE:
            self.on_error(lane_op.op, number, error)

    def _lane(
        self, number: int, plans: tuple[OpPlan, ...], shift: int, place: torch.device
    ) -> LaneOps:
        watch = make_stopwatch(2 * len(plans), place)
        ops = [
            self._lane_op(plan, shift, OpTimer.of(watch, i, len(plans), number))
            for i, plan in enumerate(plans)
        ]
        computes = [plan.op.kind not in ASYNCHRONOUS for plan in plans]
        return LaneOps(ops, watch, np.array(computes, dtype=bool))

    def _lane_op(self, plan: OpPlan, shift: int, timer: OpTimer) -> LaneOp:
        op = replace(plan.op, step=plan.op.step - shift)
        text = f"{self.prefix}{replace(op, step=0)}"
        action = self._action(op, timer)
        return LaneOp(op, text, action, plan.waits, plan.records, op.kind in STEP_ENDS)

    def _action(self, op: Op, timer: OpTimer) -> Action:
        ops, index = self.stages[op.stage], op.microbatch
        timer = ops.timed_alone(timer)
        if index is None:
            return partial(self._once_per_step(op), ops, timer)
        split = (op.stage, index) in self._split
        match op.kind:
            case Kind.FORWARD if self.evaluates:
                return partial(self._evaluate, ops, index, timer)
            case Kind.FORWARD:
                play = partial(ops.forward, index, timer, splits=split)
                forward = self._with_end_of_forwards(ops, play)
                return self._after_ties(ops, self.ties.before_forward, forward)
            case Kind.BACKWARD:
                backward = ops.split_backward if split else ops.backward
                play = partial(
                    self._count_gradient, ops, partial(backward, index, timer)
                )
                return self._after_ties(ops, self.ties.before_backward, play)
            case Kind.BACKWARD_INPUT:
                play = partial(ops.input_gradients, index, timer)
                return self._after_ties(ops, self.ties.before_backward, play)
            case Kind.BACKWARD_WEIGHT:
                play = partial(ops.weight_gradients, index, timer)
                return partial(self._count_gradient, ops, play)
            case _:
                raise AssertionError(f"{op}: playable_order leaves no such op")

    def _once_per_step(self, op: Op) -> Callable[[StageOps, OpTimer, NetBatches], None]:
        match op.kind:
            case Kind.LOSS:
                return self._loss
            case Kind.GATHER:
                return self._gather
            case Kind.REDUCE:
                return self._end.reduce
            case Kind.UPDATE if op.stage in self.followers:
                return self._end.follow
            case Kind.UPDATE:
                return self._end.update
            case _:
                raise AssertionError(f"{op}: playable_order leaves no such op")

    def _evaluate(
        self, ops: StageOps, index: int, timer: OpTimer, batch: NetBatches
    ) -> None:
        found = ops.evaluate(index, timer, batch)
        if found is not None and self.on_output is not None:
            self.on_output(batch[ops.net].microbatches[index], *found)

    def _with_end_of_forwards(self, ops: StageOps, play: Action) -> Action:
        """Return what plays F, and ends a batch's forwards if that does something."""
        stage = ops.number
        if ops.makes_loss or self._buffer_readers[stage] or stage in self.followers:
            return partial(self._count_forward, ops, play)
        return play

    def _count_forward(self, ops: StageOps, play: Action, batch: NetBatches) -> None:
        play(batch)
        stage, work = ops.number, batch[ops.net]
        if not self._num_forwards.is_last(stage, work):
            return
        if ops.makes_loss:
            self.sync.after_losses(stage, work)
        for follower in self._buffer_readers[stage]:
            follower.after_forwards_of(stage, work.step.number)
        versions = self.runners[stage].versions
        if stage in self.followers and versions is not None and work.ends_step:
            with ops.lock:
                versions.complete(work.step.number)

    def _after_ties(self, ops: StageOps, exchange: Exchange, play: Action) -> Action:
        """Return what plays an op once its stage's shared weights are exchanged."""
        return partial(self._tied, ops, exchange, play) if self._has_ties else play

    def _tied(
        self, ops: StageOps, exchange: Exchange, play: Action, batch: NetBatches
    ) -> None:
        exchange(ops.number, batch[ops.net].step.number)
        self._notes.resume()
        play(batch)

    def _count_gradient(self, ops: StageOps, play: Action, batch: NetBatches) -> None:
        play(batch)
        work = batch[ops.net]
        if self._num_gradients.is_last(ops.number, work):
            self._end.end_backwards(ops, work)

    def _loss(self, ops: StageOps, timer: OpTimer, batch: NetBatches) -> None:
        assert ops.loss is not None
        ops.loss.play(batch, timer)
        self.sync.after_losses(ops.number, batch[ops.net])

    def _gather(self, ops: StageOps, timer: OpTimer, batch: NetBatches) -> None:
        assert ops.gather is not None
        ops.gather.play(batch, timer)


def _without_late_ends(lanes: Sequence[Late[Times]]) -> list[Times]:
    """Return the times of ops, by lane, of watches with two places for each."""
    return [
        (start_s[: len(start_s) // 2], end_s[: len(end_s) // 2])
        for start_s, end_s in (late.value for late in lanes)
    ]
