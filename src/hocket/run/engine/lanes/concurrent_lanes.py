"""Issue the ops of several lanes of one device, which run concurrently.

host      issues 0F0 1F0 0W0 ...       in an order in which no lane waits for an op
lane 0    0F0 ─────── 1F0              that is not issued yet
lane 1          └ event ─ 0W0
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from hocket.core.accesses import accesses
from hocket.core.dataflow import Value
from hocket.core.op import Op
from hocket.run.data.step_batch import Batches, first_of
from hocket.run.device.device import Device, Event, IssueOrder
from hocket.run.diagnostics.flight_recorder import FlightRecorder
from hocket.run.engine.lanes.lane_ops import LaneOp, LaneOps
from hocket.run.engine.lanes.message_order import ordered_by_messages
from hocket.run.engine.lanes.play_plan import PlayPlan, Portion


class ConcurrentLanes:
    """Plays portions in the lanes of one device.

    Args:
        device: has the lanes.
        plan: what is played.
        numbers: the lanes' numbers in the schedule, ascending.
        lanes: their ops, by portion.
        play: plays one op, of a step, on the batches under way, in a lane.
        recorder: notes each op; those of several lanes overlap.
    """

    def __init__(
        self,
        device: Device,
        plan: PlayPlan,
        numbers: tuple[int, ...],
        lanes: Mapping[Portion, Sequence[LaneOps]],
        play: Callable[[LaneOp, int, Batches, int], None],
        recorder: FlightRecorder,
    ) -> None:
        self._device = device
        self._plan = plan
        self._numbers = numbers
        self._lanes = lanes
        self._play = play
        self._recorder = recorder
        self._lock = threading.Lock()  # of the recorder
        # The order of issue, and the values for which there are events; by portion.
        self._issued = {portion: [*self._in_order(portion)] for portion in lanes}
        self._made = {
            portion: {
                value for one in own for lane_op in one.ops for value in lane_op.records
            }
            for portion, own in lanes.items()
        }
        # Orders by way of other devices, where a sanitizer would not see them.
        self._before: dict[Portion, dict[Op, tuple[Op, ...]]] = {}
        for portion in lanes if device.sanitizer is not None else ():
            part = plan.portions[portion]
            self._before[portion] = ordered_by_messages(part, numbers, plan.program)

    def play(self, portion: Portion, first: int, batches: Batches) -> None:
        """Play a portion; the lanes are joined at its end, where the next one begins.

        Args:
            portion: the portion.
            first: the step that its step 0 is.
            batches: all batches under way.

        Raises:
            RunError: an op failed.
        """
        device, made = self._device, self._made[portion]
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
        except BaseException:
            # No lane may run on where the caller cleans up. What this lane waited for
            # may have failed in another one: the first error of all is raised.
            device.join()
            raise
        device.join()

    def _play_op(
        self, lane: int, lane_op: LaneOp, first: int, batches: Batches
    ) -> None:
        number = first + lane_op.op.step
        with self._lock:
            step = first_of(batches[number]).step.number
            slot = self._recorder.begin(lane_op.text, step)
        sanitizer = self._device.sanitizer
        if sanitizer is not None:
            op = replace(lane_op.op, step=number)
            for access in accesses(op, self._plan.program):
                sanitizer.access(lane, lane_op.text, str(access), writes=access.writes)
        self._play(lane_op, number, batches, lane)
        with self._lock:
            self._recorder.end(slot)

    def _in_order(self, portion: Portion) -> Iterator[tuple[int, LaneOp]]:
        """Yield the number of a lane and its next op, as the host must issue them."""
        lanes = self._lanes[portion]
        if self._device.issue_order is IssueOrder.SIDE_LANES_FIRST:
            for number in reversed(range(len(lanes))):
                for lane_op in lanes[number].ops:
                    yield number, lane_op
            return
        left = [iter(lane.ops) for lane in lanes]
        part, program = self._plan.portions[portion], self._plan.program
        place = {lane: i for i, lane in enumerate(self._numbers)}
        for lane, _ in part.in_order(self._numbers, program):
            yield place[lane], next(left[place[lane]])
