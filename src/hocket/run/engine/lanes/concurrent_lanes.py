"""Issue the ops of several lanes of one device, which run concurrently.

host      issues 0F0 1F0 0W0 ...       in an order in which no lane waits for an op
lane 0    0F0 ─────── 1F0              that is not issued yet
lane 1          └ event ─ 0W0
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hocket.core.accesses import accesses
from hocket.core.dataflow import Value, makes
from hocket.core.op import STEP_ENDS, Op
from hocket.core.program import Program
from hocket.run.data.step_batch import Batches, first_of
from hocket.run.device.device import Device, Event, IssueOrder
from hocket.run.device.stopwatch import Seconds, Stopwatch
from hocket.run.diagnostics.flight_recorder import FlightRecorder
from hocket.run.engine.lanes.action import OpAction
from hocket.run.engine.lanes.op_times import OpTimer
from hocket.run.engine.lanes.play_plan import PlayPlan, Portion, PortionPlan

# Of each lane of the device: how many of its ops have come before.
_Clock: TypeAlias = tuple[int, ...]


@dataclass(eq=False)
class ConcurrentLanes:
    """Plays portions in the lanes of one device.

    Args:
        device: has the lanes.
        plan: what is played.
        numbers: the lanes' numbers in the schedule, ascending.
        lanes: their ops, by portion.
        play_op: plays one op, of a step, on the batches under way, in a lane.
        recorder: notes each op; those of several lanes overlap.
    """

    device: Device
    plan: PlayPlan
    numbers: tuple[int, ...]
    lanes: Mapping[Portion, Sequence[LaneOps]]
    play_op: Callable[[LaneOp, int, Batches, int], None]
    recorder: FlightRecorder

    def __post_init__(self) -> None:
        """Put the ops in the order in which the host issues them."""
        self._lock = threading.Lock()  # of the recorder
        # The order of issue, and the values for which there are events; by portion.
        self._issued = {portion: [*self._in_order(portion)] for portion in self.lanes}
        self._made = {
            portion: {
                value for one in own for lane_op in one.ops for value in lane_op.records
            }
            for portion, own in self.lanes.items()
        }
        # Orders by way of other devices, where a sanitizer would not see them.
        self._before: dict[Portion, dict[Op, tuple[Op, ...]]] = {}
        for portion in self.lanes if self.device.sanitizer is not None else ():
            part = self.plan.portions[portion]
            program = self.plan.program
            self._before[portion] = ordered_by_messages(part, self.numbers, program)

    def play(self, portion: Portion, first: int, batches: Batches) -> None:
        """Play a portion; the lanes are joined at its end, where the next one begins.

        Args:
            portion: the portion.
            first: the step that its step 0 is.
            batches: all batches under way.

        Raises:
            RunError: an op failed.
        """
        device, made = self.device, self._made[portion]
        events: defaultdict[Value | Op, Event] = defaultdict(device.new_event)
        before = self._before.get(portion, {})
        ordering = {op for ops in before.values() for op in ops}
        device.fork()
        try:
            for number, lane_op in self._issued[portion]:
                work = first_of(batches[first + lane_op.op.step])
                if lane_op.is_step_end and not work.ends_step:
                    continue
                waits = [events[value] for value in lane_op.waits if value in made]
                records = [events[value] for value in lane_op.records]
                if before:
                    waits += [events[op] for op in before.get(lane_op.op, ())]
                    records += [events[lane_op.op]] if lane_op.op in ordering else []
                device.lanes[number].submit(
                    partial(self._play_op, number, lane_op, first, batches),
                    waits=waits,
                    records=records,
                    label=lane_op.text,
                )
        finally:
            # No lane may run on where the caller cleans up. What this lane waited for
            # may have failed in another one: the first error of all is raised.
            device.join()

    def _play_op(
        self, lane: int, lane_op: LaneOp, first: int, batches: Batches
    ) -> None:
        number = first + lane_op.op.step
        with self._lock:
            step = first_of(batches[number]).step.number
            slot = self.recorder.begin(lane_op.text, step)
        sanitizer = self.device.sanitizer
        if sanitizer is not None:
            op = replace(lane_op.op, step=number)
            for access in accesses(op, self.plan.program):
                sanitizer.access(lane, lane_op.text, str(access), writes=access.writes)
        self.play_op(lane_op, number, batches, lane)
        with self._lock:
            self.recorder.end(slot)

    def _in_order(self, portion: Portion) -> Iterator[tuple[int, LaneOp]]:
        """Yield the number of a lane and its next op, as the host must issue them."""
        lanes = self.lanes[portion]
        if self.device.issue_order is IssueOrder.SIDE_LANES_FIRST:
            for number in reversed(range(len(lanes))):
                for lane_op in lanes[number].ops:
                    yield number, lane_op
            return
        left = [iter(lane.ops) for lane in lanes]
        part, program = self.plan.portions[portion], self.plan.program
        place = {lane: i for i, lane in enumerate(self.numbers)}
        for lane, _ in part.in_order(self.numbers, program):
            yield place[lane], next(left[place[lane]])


# Between two lanes of a device there may be no event, but a path of messages:
#
#     d0     0F1 ───╮                 0W1 ──▶ 0F0 ───╮
#     d1     lane 0 ╰▶ 1F1 ──▶ 1B1 ───╯              │
#            lane 1                                  ╰▶ 1F0 comes after 1F1, in any run
#
# The sanitizer of a device sees its own events only: these orders become events for it.
def ordered_by_messages(
    part: PortionPlan, numbers: tuple[int, ...], program: Program
) -> dict[Op, tuple[Op, ...]]:
    """Return the ops of other lanes that come before an op by way of its messages.

    Args:
        part: the portion, with the lanes of all devices.
        numbers: the lanes of one device, ascending.
        program: says what ops make.

    Returns:
        Of each op that receives messages: the last op of each other lane of the device
        that its messages come after. Steps count from the portion's first.
    """
    every = tuple(range(len(part.lanes)))
    now: dict[int, _Clock] = dict.fromkeys(every, (0,) * len(numbers))
    made: dict[Value, _Clock] = {}
    found: dict[Op, list[Op]] = {}
    for number, plan in part.in_order(every, program):
        received = [made[x.value] for x in plan.receives if x.value in made]
        waited = [made[value] for value in plan.waits if value in made]
        clock = now[number]
        if number in numbers and received:
            heard = tuple(map(max, *received, received[0]))
            found[plan.op] = [
                last
                for other, count in zip(numbers, heard, strict=True)
                if other != number and (last := _last_sender(part, other, count))
            ]
        for other in (*received, *waited):
            clock = tuple(map(max, clock, other))
        if number in numbers:
            place = numbers.index(number)
            clock = (*clock[:place], clock[place] + 1, *clock[place + 1 :])
        now[number] = clock
        made.update(dict.fromkeys(makes(plan.op, program), clock))
    return {
        _shifted(op, part): tuple(_shifted(x, part) for x in before)
        for op, before in found.items()
    }


def _last_sender(part: PortionPlan, lane: int, count: int) -> Op | None:
    """Return the last of a lane's first ops that may send: R and U send nothing."""
    ops = (plan.op for plan in reversed(part.lanes[lane][:count]))
    return next((op for op in ops if op.kind not in STEP_ENDS), None)


def _shifted(op: Op, part: PortionPlan) -> Op:
    return replace(op, step=op.step - part.shift)


@dataclass(frozen=True, slots=True)
class LaneOp:
    """One op of a lane.

    Args:
        op: its step counts from the portion's first.
        text: what the flight recorder notes.
        action: plays it on a batch of each net.
        timer: takes its time.
        waits: values of other lanes that it needs.
        records: values of it that other lanes wait for.
        is_step_end: whether it is a reduction or an update.
    """

    op: Op
    text: str
    action: OpAction
    timer: OpTimer
    waits: tuple[Value, ...]
    records: tuple[Value, ...]
    is_step_end: bool


@dataclass(frozen=True, slots=True)
class LaneOps:
    """One lane's part of a portion, ready to play.

    Args:
        ops: its ops.
        watch: takes their times.
        computes: which of them take the lane's own time.
    """

    ops: list[LaneOp]
    watch: Stopwatch
    computes: NDArray[np.bool_]

    def worked_s(self, start_s: Seconds, end_s: Seconds) -> tuple[float, float]:
        """Return for how many seconds the lane itself worked, and when it had ended.

        Args:
            start_s: when each op began.
            end_s: when each op ended.
        """
        ends_s = end_s[self.computes]
        busy_s = float((ends_s - start_s[self.computes]).sum())
        return busy_s, float(ends_s.max(initial=0.0))
