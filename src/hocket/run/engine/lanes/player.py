"""Play the lanes of one device: receive, compute, send, in the schedule's order.

Each op of a lane becomes a turn, looked up once. To play it:

    take its inputs │ compute (the op's span) │ put what it made │ release its inputs
     Input.take     │  StageRunner, Updater   │  Output.put      │  Input.release

What comes from where, and goes where, follows from `hocket.core.dataflow` by way of
`hocket.core.lane_plan`.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

import numpy as np
import torch

from hocket.core.accesses import accesses
from hocket.core.dataflow import Value
from hocket.core.lane_plan import OpPlan
from hocket.core.op import ASYNCHRONOUS, Kind, Op
from hocket.run.data.batch import Microbatch
from hocket.run.data.step_batch import Batches, NetBatches, StepBatch, first_of
from hocket.run.device.device import Device, Event, IssueOrder
from hocket.run.device.stopwatch import make_stopwatch
from hocket.run.diagnostics.flight_recorder import FlightRecorder
from hocket.run.engine.lanes.play_plan import PlayPlan, Portion
from hocket.run.engine.lanes.point_to_point import PointToPoint
from hocket.run.engine.lanes.ports import InputMaker
from hocket.run.engine.lanes.record import OpTimer, Record
from hocket.run.engine.lanes.stage_ops import StageOps
from hocket.run.engine.lanes.turns import LaneTurns, Turn
from hocket.run.engine.lanes.wiring import Wiring
from hocket.run.engine.sync.step_sync import NoSync, StepSync
from hocket.run.stage.runner import StageRunner
from hocket.run.weights.momentum import Follower
from hocket.run.weights.stale_ties.worker_ties import WorkerTies
from hocket.run.weights.updater import Updater

OnError: TypeAlias = Callable[[Op, int, Exception], None]
OnOutput: TypeAlias = Callable[[int, Microbatch, object], None]

_ENDS: Final = frozenset({Kind.REDUCE, Kind.UPDATE})  # what ends a step


class Player:
    """Plays the lanes of one device, portion by portion.

    Attributes:
        maker: makes the ways in and out of stages.
        stages: plays the ops of each stage of this device.

    Args:
        plan: what is played.
        device: this worker's.
        runners: this device's stages.
        updaters: the stages' updaters; none in evaluation.
        channels: messages to and from other devices.
        recorder: notes each op, for the report of a failure.
        sync: losses, gradients and gates; None where nothing is updated.
        ties: the weights that stages of different delays share.
        on_output: evaluation: called with each microbatch and the model's output.
        on_error: called when an op has failed, with its step; may raise a better error.
        evaluates: forwards keep nothing.
        prefix: begins what the flight recorder notes.
        lanes: the device's lanes, where it has several.
        wiring: which values go along each flow; all along every flow when not given.
        followers: the stages whose weights follow those of others.
    """

    def __init__(
        self,
        plan: PlayPlan,
        device: int,
        runners: Mapping[int, StageRunner],
        updaters: Mapping[int, Updater],
        channels: PointToPoint,
        recorder: FlightRecorder,
        sync: StepSync | None = None,
        ties: WorkerTies | None = None,
        *,
        on_output: OnOutput | None = None,
        on_error: OnError | None = None,
        evaluates: bool = False,
        prefix: str = "",
        lanes: Device | None = None,
        wiring: Wiring | None = None,
        followers: Mapping[int, Follower] | None = None,
    ) -> None:
        self._plan = plan
        self._followers = {} if followers is None else followers
        self._lanes = lanes
        self._lock = threading.RLock()  # of the reductions and the flight recorder
        self._runners = runners
        self._updaters = updaters
        self._channels = channels
        self._recorder = recorder
        self._sync = NoSync() if sync is None else sync
        self._ties = WorkerTies((), {}, {}, ()) if ties is None else ties
        self._on_output = on_output
        self._on_error = on_error
        self._evaluates = evaluates
        self._prefix = prefix
        self._numbers = plan.schedule.lanes_of(device)
        (place,) = {runner.device for runner in runners.values()}
        wiring = Wiring() if wiring is None else wiring
        self.maker = InputMaker(plan.program, wiring, device, channels, recorder)
        self.stages = {
            number: StageOps(
                number, runner, plan.program, wiring, self.maker, evaluates=evaluates
            )
            for number, runner in runners.items()
        }
        if lanes is not None:
            for stage in self.stages.values():
                stage.share_between_lanes(lanes, self._numbers)
        self._split = frozenset(
            (plan_.op.stage, plan_.op.microbatch)
            for part in plan.portions.values()
            for number in self._numbers
            for plan_ in part.lanes[number]
            if plan_.op.kind is Kind.BACKWARD_INPUT
        )
        self._parts = {
            portion: [
                self._lane(number, part.lanes[number], part.shift, place)
                for number in self._numbers
            ]
            for portion, part in plan.portions.items()
        }
        self._orders = {
            portion: channels.orders_of(part) for portion, part in plan.portions.items()
        }
        # What is left of a stage's step: forwards that make a loss or read weights that
        # follow others, and ops that add to its gradients.
        self._num_forwards: dict[tuple[int, int, int], int] = {}
        self._num_gradients: dict[tuple[int, int, int], int] = {}
        self._reducing: dict[int, OpTimer] = {}  # where R began, by stage
        self._unfinished: dict[int, StepBatch] = {}  # whose sum is under way, by stage
        # What waits for an update of an earlier step, by stage.
        self._postponed: dict[int, deque[tuple[int, Callable[[], None]]]] = {}

    def begin(self, batches: NetBatches) -> None:
        """Begin a batch of each net: its header goes before its first messages."""
        steps = {net: work.step for net, work in batches.items()}
        number = next(iter(steps.values())).number
        self._recorder.begin(f"{self._prefix}begin", number)
        self._channels.begin(steps)
        self._recorder.end()

    def play(self, portion: Portion, first: int, batches: Batches) -> Record:
        """Play a portion.

        Args:
            portion: the portion.
            first: the step that its step 0 is.
            batches: all batches under way, by step and net. One that does not close
                its step is played without reductions and updates.

        Raises:
            RunError: something went wrong.
        """
        self._channels.expect(self._orders[portion], first, batches)
        lanes = self._parts[portion]
        try:
            if self._lanes is None:
                self._play_lane(lanes[0], first, batches)
            else:
                self._play_lanes(self._lanes, portion, first, batches)
        finally:
            for runner in self._runners.values():
                if runner.versions is not None:
                    runner.versions.take_out()
        if portion is Portion.STEP:
            self._sync.close(batches[first], self._finish)
        if portion is not Portion.BODY:
            self._channels.flush()
        if portion in (Portion.EPILOGUE, Portion.STEP):
            self._ties.settle()
        for timer in self._reducing.values():  # they go on, but the record ends here
            timer.end()
        self._reducing.clear()
        times = [lane.watch.read() for lane in lanes]
        return Record(tuple(a for a, _ in times), tuple(b for _, b in times))

    def busy_s(self, portion: Portion, record: Record) -> float:
        """Return how long a lane itself worked, in seconds; the mean over lanes."""
        lanes = self._parts[portion]
        times = zip(lanes, record.start_s, record.end_s, strict=True)
        return sum(float((b - a)[lane.computes].sum()) for lane, a, b in times) / len(
            lanes
        )

    def _play_lane(self, lane: LaneTurns, first: int, batches: Batches) -> None:
        recorder = self._recorder
        closes = all(first_of(nets).closes for nets in batches.values())
        for turn in lane.turns if closes else lane.unfinished:
            number = first + turn.op.step
            recorder.begin(turn.text, number)
            try:
                turn.action(batches[number])
                if self._unfinished:
                    self._look_after_sums()
            except Exception as error:
                if self._on_error is not None:
                    self._on_error(turn.op, number, error)
                raise
            recorder.end()

    def _play_lanes(
        self, device: Device, portion: Portion, first: int, batches: Batches
    ) -> None:
        """Issue the ops of all lanes; events keep the order that values ask for.

        The lanes are joined at the end, where the next portion begins.
        """
        closes = all(first_of(nets).closes for nets in batches.values())
        events: defaultdict[Value, Event] = defaultdict(device.new_event)
        made = {
            value
            for lane in self._parts[portion]
            for turn in lane.turns
            for value in turn.records
        }
        device.fork()
        for number, turn in self._issued(device, portion):
            if not closes and turn.op.kind in _ENDS:
                continue
            device.lanes[number].submit(
                partial(self._play_turn, device, number, turn, first, batches),
                waits=[events[value] for value in turn.waits if value in made],
                records=[events[value] for value in turn.records],
                label=turn.text,
            )
        device.join()

    def _issued(self, device: Device, portion: Portion) -> Iterator[tuple[int, Turn]]:
        """Yield the number of a lane and its next op, as the host must issue them."""
        lanes = self._parts[portion]
        if device.issue_order is IssueOrder.SIDE_LANES_FIRST:
            for number in reversed(range(len(lanes))):
                for turn in lanes[number].turns:
                    yield number, turn
            return
        left = [iter(lane.turns) for lane in lanes]
        part, program = self._plan.portions[portion], self._plan.program
        place = {lane: i for i, lane in enumerate(self._numbers)}
        for lane, _ in part.in_order(self._numbers, program):
            yield place[lane], next(left[place[lane]])

    def _play_turn(
        self, device: Device, lane: int, turn: Turn, first: int, batches: Batches
    ) -> None:
        """Play one op in its lane."""
        number = first + turn.op.step
        if device.sanitizer is not None:
            for access in accesses(turn.op, self._plan.program):
                what = access.resource, access.stage, access.number + first
                device.sanitizer.access(lane, turn.text, what, writes=access.writes)
        try:
            turn.action(batches[number])
            if not lane and self._unfinished:
                self._look_after_sums()
        except Exception as error:
            if self._on_error is not None:
                self._on_error(turn.op, number, error)
            raise
        with self._lock:
            self._recorder.begin(turn.text, number)
            self._recorder.end()

    def _lane(
        self, number: int, plans: tuple[OpPlan, ...], shift: int, place: torch.device
    ) -> LaneTurns:
        watch = make_stopwatch(len(plans), place)
        turns = [
            self._turn(plan, shift, OpTimer(watch, i, number))
            for i, plan in enumerate(plans)
        ]
        computes = [plan.op.kind not in ASYNCHRONOUS for plan in plans]
        return LaneTurns(
            turns,
            [turn for turn in turns if turn.op.kind not in _ENDS],
            watch,
            np.array(computes, dtype=bool),
        )

    def _turn(self, plan: OpPlan, shift: int, timer: OpTimer) -> Turn:
        op = replace(plan.op, step=plan.op.step - shift)
        text = f"{self._prefix}{replace(op, step=0)}"
        return Turn(op, text, self._action(op, timer), plan.waits, plan.records)

    def _action(self, op: Op, timer: OpTimer) -> Callable[[NetBatches], None]:
        match op:
            case Op(kind=Kind.FORWARD, microbatch=int(index)):
                play = self._evaluate if self._evaluates else self._forward
            case Op(kind=Kind.BACKWARD, microbatch=int(index)):
                play = self._backward
            case Op(kind=Kind.BACKWARD_INPUT, microbatch=int(index)):
                play = self._input_gradients
            case Op(kind=Kind.BACKWARD_WEIGHT, microbatch=int(index)):
                play = self._weight_gradients
            case _:
                return partial(self._once_per_step(op), op.stage, timer)
        return partial(play, op.stage, index, timer)

    def _once_per_step(self, op: Op) -> Callable[[int, OpTimer, NetBatches], None]:
        match op.kind:
            case Kind.LOSS:
                return self._loss
            case Kind.GATHER:
                return self._gather
            case Kind.REDUCE:
                return self._reduce
            case Kind.UPDATE if op.stage in self._followers:
                return self._follow
            case Kind.UPDATE:
                return self._update
            case _:
                raise AssertionError(f"{op}: make_order refuses what is not played")

    def _work(self, stage: int, batch: NetBatches) -> StepBatch:
        return batch[self.stages[stage].net]

    def _evaluate(
        self, stage: int, index: int, timer: OpTimer, batch: NetBatches
    ) -> None:
        output = self.stages[stage].evaluate(batch, index, timer)
        if output is not None and self._on_output is not None:
            microbatch = self._work(stage, batch).microbatches[index]
            self._on_output(stage, microbatch, output)

    def _forward(
        self, stage: int, index: int, timer: OpTimer, batch: NetBatches
    ) -> None:
        ops, work = self.stages[stage], self._work(stage, batch)
        if self._ties:
            self._ties.before_forward(stage, work.step.number)
            self._recorder.resume()
        ops.forward(batch, index, timer, splits=(stage, index) in self._split)
        if not ops.makes_loss and stage not in self._followers:
            return
        if self._is_last(self._num_forwards, stage, work):
            if ops.makes_loss:
                self._sync.after_losses(stage, work)
            versions = self._runners[stage].versions
            if stage in self._followers and versions is not None:
                with ops.lock:
                    versions.complete(work.step.number)

    def _loss(self, stage: int, timer: OpTimer, batch: NetBatches) -> None:
        loss = self.stages[stage].loss
        assert loss is not None
        loss.play(batch, timer)
        self._sync.after_losses(stage, self._work(stage, batch))

    def _gather(self, stage: int, timer: OpTimer, batch: NetBatches) -> None:
        gather = self.stages[stage].gather
        assert gather is not None
        gather.play(batch, timer)

    def _backward(
        self, stage: int, index: int, timer: OpTimer, batch: NetBatches
    ) -> None:
        if (stage, index) in self._split:  # whole here, in halves in another step
            self._input_gradients(stage, index, timer, batch)
            self._weight_gradients(stage, index, timer, batch)
            return
        work = self._work(stage, batch)
        if self._ties:
            self._ties.before_backward(stage, work.step.number)
        self.stages[stage].backward(batch, index, timer)
        self._count_gradient(stage, work)

    def _input_gradients(
        self, stage: int, index: int, timer: OpTimer, batch: NetBatches
    ) -> None:
        if self._ties:
            number = self._work(stage, batch).step.number
            self._ties.before_backward(stage, number)
        self.stages[stage].input_gradients(batch, index, timer)

    def _weight_gradients(
        self, stage: int, index: int, timer: OpTimer, batch: NetBatches
    ) -> None:
        self.stages[stage].weight_gradients(batch, index, timer)
        self._count_gradient(stage, self._work(stage, batch))

    def _is_last(
        self, left: dict[tuple[int, int, int], int], stage: int, work: StepBatch
    ) -> bool:
        """Count one microbatch of a stage's batch; whether it was the last."""
        key = stage, work.step.number, work.step.first
        num_left = left.pop(key, len(work.microbatches)) - 1
        if num_left:
            left[key] = num_left
        return not num_left

    def _count_gradient(self, stage: int, work: StepBatch) -> None:
        """Count an op that added to a stage's gradients, and act behind the last.

        Then they go where the optimizer looks for them: the next step's may begin
        before the update, with other weights or the same.
        """
        if not self._is_last(self._num_gradients, stage, work) or not work.closes:
            return
        versions = self._runners[stage].versions
        if versions is not None:
            with self.stages[stage].lock:
                versions.complete(work.step.number)
        self._when_next(stage, work, partial(self._complete, stage, work))

    def _when_next(self, stage: int, work: StepBatch, act: Callable[[], None]) -> None:
        """Act on a step's complete gradients, when earlier steps have been updated."""
        versions = self._runners[stage].versions
        if versions is None or versions.is_next(work.step.number):
            act()
        else:
            self._postponed.setdefault(stage, deque()).append((work.step.number, act))

    def _complete(self, stage: int, work: StepBatch) -> None:
        if self._ties:
            self._ties.complete(stage, work.step.number)
            self._recorder.resume()
        self._sync.after_backwards(stage, work)
        if stage in self._updaters and self._updaters[stage].reducer is None:
            self._sync.after_gradients(stage, work)

    def _reduce(self, stage: int, timer: OpTimer, batch: NetBatches) -> None:
        work = self._work(stage, batch)

        def start() -> None:
            reducer = self._updaters[stage].reducer
            assert reducer is not None
            timer.start()
            reducer.start()
            self._reducing[stage] = timer
            self._unfinished[stage] = work
            self._sync.after_reduction_began(stage, work)

        self._when_next(stage, work, start)

    def _look_after_sums(self) -> None:
        """Take reductions that have ended; they end by themselves, at any time."""
        with self._lock:
            for stage, work in [*self._unfinished.items()]:
                reducer = self._updaters[stage].reducer
                assert reducer is not None
                if reducer.is_done():
                    self._finish(stage)
                    self._sync.after_gradients(stage, work)

    def _finish(self, stage: int) -> None:
        """Wait for the sum of a stage's gradients, where it is under way."""
        with self._lock:
            self._updaters[stage].wait()
            self._unfinished.pop(stage, None)
            if stage in self._reducing:
                self._reducing.pop(stage).end()

    def _update(self, stage: int, timer: OpTimer, batch: NetBatches) -> None:
        updater, work = self._updaters[stage], self._work(stage, batch)
        updates = self._sync.before_update(stage, work, self._finish)
        self._recorder.resume()
        versions = self._runners[stage].versions
        with self.stages[stage].lock:
            timer.start()
            if versions is not None:
                versions.before_update()
            if updates:
                updater.update()
            else:
                updater.forget()
            if versions is not None:
                versions.after_update()
            timer.end()
        self._ties.after_update(stage)
        postponed = self._postponed.get(stage)
        while postponed and postponed[0][0] <= work.step.number + 1:
            postponed.popleft()[1]()

    def _follow(self, stage: int, timer: OpTimer, batch: NetBatches) -> None:
        versions = self._runners[stage].versions
        with self.stages[stage].lock:
            timer.start()
            if versions is not None:
                versions.before_update()
            self._followers[stage].update(self._work(stage, batch).step.number)
            if versions is not None:
                versions.after_update()
            timer.end()
