"""Play the lanes of one device: what an op table says, in the schedule's order.

    lane     0F0           1F0           0B0         ops of the order, one after another
    table    take │ forward │ put        ...         each op's instructions

Each op of a lane becomes a `LaneOp`, looked up once. Where a device has several lanes,
their ops run concurrently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import TypeAlias

import numpy as np
import torch

from hocket.core.op import ASYNCHRONOUS, STEP_ENDS, Op
from hocket.core.plans.lane_plan import OpPlan
from hocket.core.schedule import Schedule
from hocket.run.comm.step_header import StepHeader
from hocket.run.data.step_batch import Batches, NetBatches, first_of
from hocket.run.device.device import Device
from hocket.run.device.late import Late
from hocket.run.device.stopwatch import Times, make_stopwatch
from hocket.run.diagnostics.flight_recorder import FlightRecorder
from hocket.run.engine.lanes.action import OpAction
from hocket.run.engine.lanes.concurrent_lanes import ConcurrentLanes, LaneOp, LaneOps
from hocket.run.engine.lanes.op_times import OpTimer, OpTimes
from hocket.run.engine.lanes.play_plan import PlayPlan, Portion

OnError: TypeAlias = Callable[[Op, int, Exception], None]


class OpTable:
    """Says what is done for each op, and around them: nothing, if it does not say so.

    Attributes:
        torch_device: what the ops compute on.
        goes_on: whether reductions went on after the last portion.
        takes_others: whether ops of another net may be played between these.
    """

    torch_device: torch.device
    goes_on = False
    takes_others = False

    def action(self, op: Op) -> OpAction:
        """Return what is done for an op; its step does not matter."""
        raise NotImplementedError

    def begin(self, steps: Mapping[str, StepHeader]) -> None:
        """Begin a batch, of which each net has a header."""

    def begin_portion(self, portion: Portion, first: int, batches: Batches) -> None:
        """Begin a portion, of which step 0 is the step `first`."""

    def begin_step_end(self) -> None:
        """Called before a reduction or an update."""

    def take_finished(self) -> None:
        """Called between ops: reductions may have ended."""

    def leave_portion(self) -> None:
        """Called after the last op of a portion, and after one that has failed."""

    def end_portion(self, portion: Portion, first: int, batches: Batches) -> None:
        """End a portion, all ops of which were played."""


class Player:
    """Plays the lanes of one device, portion by portion.

    Args:
        plan: what is played.
        device: this worker's.
        table: what is done for each op.
        recorder: notes each op, for the report of a failure.
        on_error: called when an op has failed, with its step; may raise a better error.
        prefix: begins what the flight recorder notes.
        lanes: the device's lanes, where it has several.
    """

    def __init__(
        self,
        plan: PlayPlan,
        device: int,
        table: OpTable,
        recorder: FlightRecorder,
        on_error: OnError | None = None,
        prefix: str = "",
        lanes: Device | None = None,
    ) -> None:
        self.table, self.recorder = table, recorder
        self._on_error, self._prefix = on_error, prefix
        self._numbers = plan.schedule.lanes_of(device)
        self._num_stages = plan.program.num_stages
        self._last: tuple[Portion, OpTimes] | None = None  # where R goes on after it
        actions: dict[Op, OpAction] = {}
        self._parts = {
            portion: [
                self._lane(number, part.lanes[number], part.shift, actions)
                for number in self._numbers
            ]
            for portion, part in plan.portions.items()
        }
        self._concurrent: ConcurrentLanes | None = None
        if lanes is not None:
            self._concurrent = ConcurrentLanes(
                lanes, plan, self._numbers, self._parts, self._play_op, recorder
            )

    def __str__(self) -> str:
        """Return what is done for each op, a line each, lane by lane and by portion."""
        return "\n".join(
            f"{one.op}    {one.action}"
            for lanes in self._parts.values()
            for lane in lanes
            for one in lane.ops
        )

    @property
    def takes_others(self) -> bool:
        """Whether `play_others` may be called: one lane, whose steps do not overlap."""
        is_alone = self._concurrent is None and {*self._parts} == {Portion.STEP}
        return is_alone and self.table.takes_others

    def play_others(self, order: Schedule, others: Mapping[Op, OpAction]) -> None:
        """Play ops of another net, too, where an order has them in this one's lane.

        They take part in no message, and in none of the times.

        Args:
            order: this one's, with other ops between its own.
            others: what is done for each of them, in the lane's order.
        """
        (lane,), (number,) = self._parts[Portion.STEP], self._numbers
        watch = make_stopwatch(2 * len(others), self.table.torch_device)  # not read
        found = {}
        for i, (op, action) in enumerate(others.items()):
            timer = OpTimer.of(watch, i, len(others), number)
            text = f"fill F{i}"
            found[op] = LaneOp(op, text, action, timer, (), (), is_step_end=False)
        found |= {one.op: one for one in lane.ops}
        lane.ops[:] = [found[op] for op in order.lanes[number].ops]

    def begin(self, batches: NetBatches) -> None:
        """Begin a batch of each net: its header goes before its first messages."""
        steps = {net: work.step for net, work in batches.items()}
        number = next(iter(steps.values())).number
        self.recorder.begin(f"{self._prefix}begin", number)
        self.table.begin(steps)
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
        self.table.begin_portion(portion, first, batches)
        try:
            if self._concurrent is None:
                self._play_lane(self._parts[portion][0], first, batches)
            else:
                self._concurrent.play(portion, first, batches)
        finally:
            self.table.leave_portion()
        self.table.end_portion(portion, first, batches)
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
        self._last = (portion, made) if self.table.goes_on else None
        return made

    def worked_s(self, portion: Portion, record: OpTimes) -> tuple[float, float]:
        """Return how many seconds a lane worked, and when the last one had ended.

        The seconds are the mean over all lanes.
        """
        times = zip(self._parts[portion], record.times.value, strict=True)
        worked = [lane.worked_s(*of_lane) for lane, of_lane in times]
        return fmean(busy_s for busy_s, _ in worked), max(end_s for _, end_s in worked)

    def _play_lane(self, lane: LaneOps, first: int, batches: Batches) -> None:
        recorder, table = self.recorder, self.table
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
                    table.begin_step_end()
                lane_op.action.play(batches[place], lane_op.timer)
                table.take_finished()
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
            lane_op.action.play(batches[place], lane_op.timer)
            if not lane:
                self.table.take_finished()
        except Exception as error:
            self._report(lane_op, number, error)
            raise

    def _report(self, lane_op: LaneOp, number: int, error: Exception) -> None:
        if self._on_error is not None and lane_op.op.stage < self._num_stages:
            self._on_error(lane_op.op, number, error)

    def _lane(
        self,
        number: int,
        plans: tuple[OpPlan, ...],
        shift: int,
        actions: dict[Op, OpAction],
    ) -> LaneOps:
        watch = make_stopwatch(2 * len(plans), self.table.torch_device)
        timers = (OpTimer.of(watch, i, len(plans), number) for i in range(len(plans)))
        ops = [*map(partial(self._lane_op, shift, actions), plans, timers)]
        computes = [plan.op.kind not in ASYNCHRONOUS for plan in plans]
        return LaneOps(ops, watch, np.array(computes, dtype=bool))

    def _lane_op(
        self, shift: int, actions: dict[Op, OpAction], plan: OpPlan, timer: OpTimer
    ) -> LaneOp:
        op = replace(plan.op, step=plan.op.step - shift)
        every = replace(op, step=0)  # what is done is the same in each step
        if every not in actions:
            actions[every] = self.table.action(every)
        text, is_end = f"{self._prefix}{every}", op.kind in STEP_ENDS
        return LaneOp(op, text, actions[every], timer, plan.waits, plan.records, is_end)


def _without_late_ends(lanes: Sequence[Late[Times]]) -> list[Times]:
    """Return the times of ops, by lane, of watches with two places for each."""
    return [
        (start_s[: len(start_s) // 2], end_s[: len(end_s) // 2])
        for start_s, end_s in (late.value for late in lanes)
    ]
