"""The op table of one device's stages: what is done for each op of the program.

    1F0    take output of 0 │ forward │ put output │ release output
    1B0    take gradient of 2 │ backward │ release gradient │ put gradient
    1U     judge gradients │ update

What comes from where, and goes where, follows from `hocket.core.dataflow`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from hocket.core.op import READS_WEIGHTS, Kind, Op
from hocket.run.comm.step_header import StepHeader
from hocket.run.data.batch import Microbatch
from hocket.run.data.step_batch import Batches, StepBatch
from hocket.run.diagnostics.flight_recorder import FlightRecorder
from hocket.run.engine.lanes.action import Instruction, OpAction, Playing
from hocket.run.engine.lanes.op_times import OpTimer
from hocket.run.engine.lanes.play_plan import PlayPlan, Portion
from hocket.run.engine.lanes.player import OnError, OpTable, Player
from hocket.run.engine.lanes.point_to_point import PointToPoint
from hocket.run.engine.lanes.ports import InputMaker
from hocket.run.engine.lanes.stage_ops import StageOps
from hocket.run.engine.lanes.step_end import StepEnd
from hocket.run.engine.lanes.wiring import Wiring
from hocket.run.engine.sync.step_sync import NoSync
from hocket.run.stage.runner import StageRunner
from hocket.run.weights.follower import Follower
from hocket.run.weights.sharded.shards import Shards
from hocket.run.weights.stale_ties.worker_ties import WorkerTies
from hocket.run.weights.updater import Updater

Exchange: TypeAlias = Callable[[int, int], None]  # of a stage, in a step
OnOutput: TypeAlias = Callable[[Microbatch, Any, Sequence[Any]], None]


@dataclass(eq=False)
class StageTable(OpTable):
    """Says what is done for each op of one device's stages (`OpTable`).

    Args:
        plan: what is played.
        runners: this device's stages.
        updaters: the stages' updaters; none in evaluation.
        channels: messages to and from other devices. Their context is the table's.
        sync: called as losses and gradients complete; none where nothing is updated.
        ties: the weights that stages of different delays share.
        on_output: evaluation: called with each microbatch, the model's output, and
            those of other nets that the loss reads.
        evaluates: forwards keep nothing.
        wiring: which values go along each flow; all along every flow when not given.
        followers: the stages whose weights follow those of others (as in MoCo and
            BYOL).
        shards: the weights of this worker's stages, where they are sharded.

    Attributes:
        maker: makes the inputs and outputs of stages.
        stages: makes the instructions of each stage's ops.
    """

    plan: PlayPlan
    runners: Mapping[int, StageRunner]
    updaters: Mapping[int, Updater]
    channels: PointToPoint
    sync: NoSync = field(default_factory=NoSync)
    ties: WorkerTies = field(default_factory=lambda: WorkerTies((), {}, {}, ()))
    on_output: OnOutput | None = None
    evaluates: bool = False
    wiring: Wiring = field(default_factory=Wiring)
    followers: Mapping[int, Follower] = field(default_factory=dict)
    shards: Shards | None = None
    takes_others = True

    def __post_init__(self) -> None:
        """Make the ways in and out of each stage."""
        # The followers that read the buffers of a stage, by its number.
        self._buffer_readers = {
            stage: [x for x in self.followers.values() if stage in x.buffers.stages]
            for stage in self.runners
        }
        context = self.channels.context
        lanes = context.lanes
        numbers = self.plan.schedule.lanes_of(context.layout.device)
        if lanes is not None:
            # Ops of several lanes overlap: none may change what the newest op notes.
            context = replace(context, recorder=FlightRecorder())
        self._notes = context.recorder
        program, wiring = self.plan.program, self.wiring
        self.maker = InputMaker(program, wiring, self.channels, context)
        self.stages = {
            number: StageOps(
                number, runner, program, wiring, self.maker, evaluates=self.evaluates
            )
            for number, runner in self.runners.items()
        }
        if lanes is not None:
            for stage in self.stages.values():
                stage.share_between_lanes(lanes, numbers)
        ends = self.updaters, self.followers, self.sync, self.ties
        self._end = StepEnd(self.runners, *ends, self._notes)
        (self.torch_device,) = {runner.device for runner in self.runners.values()}
        if self.sync.posts_early and any(x.reducer for x in self.updaters.values()):
            self.channels.do_meanwhile(self._end.await_norms)
        self._num_forwards, self._num_gradients = Countdown(), Countdown()
        self._gathers: dict[int, OpTimer] = {}  # of UNSHARD, by stage, until it ends
        # Stages and microbatches whose backward is I and W in some portion. Where it is
        # B, it is played as I and W, too.
        self._split = frozenset(
            (one.op.stage, one.op.microbatch)
            for part in self.plan.portions.values()
            for number in numbers
            for one in part.lanes[number]
            if one.op.kind is Kind.BACKWARD_INPUT
        )
        self._orders = {
            portion: self.channels.orders_of(part)
            for portion, part in self.plan.portions.items()
        }

    def player(self, on_error: OnError | None = None, prefix: str = "") -> Player:
        """Return what plays this table; see `Player`."""
        context = self.channels.context
        device = context.layout.device
        shown = context.recorder, on_error, prefix
        return Player(self.plan, device, self, *shown, context.lanes)

    def begin(self, steps: Mapping[str, StepHeader]) -> None:
        """See `OpTable.begin`."""
        self.channels.begin(steps)

    def begin_portion(self, portion: Portion, first: int, batches: Batches) -> None:
        """See `OpTable.begin_portion`."""
        self.channels.expect(self._orders[portion], first, batches)

    def begin_step_end(self) -> None:
        """See `OpTable.begin_step_end`."""
        self.channels.begin_step_end()

    def take_finished(self) -> None:
        """See `OpTable.take_finished`."""
        self._end.take_finished()

    def leave_portion(self) -> None:
        """See `OpTable.leave_portion`."""
        for runner in self.runners.values():
            if runner.versions is not None:
                runner.versions.take_out()

    def end_portion(self, portion: Portion, first: int, batches: Batches) -> None:
        """See `OpTable.end_portion`."""
        self.channels.end_portion()
        if portion is Portion.STEP:
            self.sync.close(batches[first], self._end.finish)
        if portion is not Portion.BODY:
            self.channels.flush()
        if portion in (Portion.EPILOGUE, Portion.STEP):
            self.ties.receive_pending()
        self.goes_on = self._end.end_record()

    def action(self, op: Op) -> OpAction:
        """See `OpTable.action`."""
        ops, index = self.stages[op.stage], op.microbatch
        first: tuple[Instruction, ...] = ()
        if self.shards is not None and op.kind in READS_WEIGHTS:
            take = partial(self._take_weights, op.stage)
            first = (Instruction("take whole weights", take),)
        return OpAction((*first, *self._instructions(op, ops)), index or 0)

    def _instructions(self, op: Op, ops: StageOps) -> Iterator[Instruction]:
        splits = (op.stage, op.microbatch) in self._split
        match op.kind:
            case Kind.FORWARD if self.evaluates:
                yield from ops.evaluate()
                if ops.is_last and self.on_output is not None:
                    hand_out = partial(self._hand_out, ops, self.on_output)
                    yield Instruction("hand out", hand_out)
            case Kind.FORWARD:
                yield from self._exchange(ops, self.ties.before_forward)
                yield from ops.forward(splits=splits)
                yield from self._end_of_forwards(ops)
            case Kind.BACKWARD:
                yield from self._exchange(ops, self.ties.before_backward)
                if splits:
                    yield from ops.input_gradients()
                    yield from ops.weight_gradients()
                else:
                    yield from ops.backward()
                yield Instruction("count", partial(self._count_gradient, ops))
            case Kind.BACKWARD_INPUT:
                yield from self._exchange(ops, self.ties.before_backward)
                yield from ops.input_gradients()
            case Kind.BACKWARD_WEIGHT:
                yield from ops.weight_gradients()
                yield Instruction("count", partial(self._count_gradient, ops))
            case _:
                yield from self._once_per_step(op, ops)

    def _once_per_step(self, op: Op, ops: StageOps) -> Iterator[Instruction]:
        match op.kind:
            case Kind.UNSHARD:
                yield Instruction("begin to gather", partial(self._unshard, op.stage))
            case Kind.RESHARD:
                yield Instruction("release", partial(self._reshard, op.stage))
            case Kind.LOSS:
                yield Instruction("loss", partial(self._loss, ops))
            case Kind.GATHER:
                assert ops.gather is not None
                yield Instruction("gather", ops.gather.play)
            case Kind.REDUCE:
                yield Instruction("begin to reduce", partial(self._end.reduce, ops))
            case Kind.UPDATE if op.stage in self.followers:
                yield Instruction("follow", partial(self._end.follow, ops))
            case Kind.UPDATE:
                yield Instruction("judge gradients", partial(self._end.judge, ops))
                yield Instruction("update", partial(self._end.update, ops))
            case _:
                raise AssertionError(f"{op}: playable_order leaves no such op")

    def _unshard(self, stage: int, one: Playing) -> None:
        assert self.shards is not None
        one.timer.start()
        self.shards.unshard(stage)
        self._gathers[stage] = one.timer

    def _take_weights(self, stage: int, _: Playing) -> None:
        assert self.shards is not None
        self.shards.take(stage)
        if stage in self._gathers:
            self._gathers.pop(stage).end()
            self._notes.resume()

    def _reshard(self, stage: int, one: Playing) -> None:
        assert self.shards is not None
        one.timer.run(self.shards.reshard, stage)

    def _hand_out(self, ops: StageOps, give: OnOutput, one: Playing) -> None:
        give(one.batch[ops.net].microbatches[one.index], *one.made)

    def _end_of_forwards(self, ops: StageOps) -> Iterator[Instruction]:
        """Yield what ends a batch's forwards, if that does something."""
        stage = ops.number
        if ops.makes_loss or self._buffer_readers[stage] or stage in self.followers:
            yield Instruction("count", partial(self._count_forward, ops))

    def _count_forward(self, ops: StageOps, one: Playing) -> None:
        stage, work = ops.number, one.batch[ops.net]
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

    def _exchange(self, ops: StageOps, exchange: Exchange) -> Iterator[Instruction]:
        """Yield what exchanges the weights that a stage shares with others."""

        def run(one: Playing) -> None:
            exchange(ops.number, one.batch[ops.net].step.number)
            self._notes.resume()

        if self.ties:
            yield Instruction("exchange ties", run)

    def _count_gradient(self, ops: StageOps, one: Playing) -> None:
        work = one.batch[ops.net]
        if self._num_gradients.is_last(ops.number, work):
            self._end.end_backwards(ops, work)

    def _loss(self, ops: StageOps, one: Playing) -> None:
        assert ops.loss is not None
        ops.loss.play(one)
        self.sync.after_losses(ops.number, one.batch[ops.net])


class Countdown:
    """Counts the microbatches of each stage's batches down to the last one."""

    def __init__(self) -> None:
        self._left: dict[tuple[int, tuple[int, int]], int] = {}

    def is_last(self, stage: int, work: StepBatch) -> bool:
        """Count one microbatch of a stage's batch; return whether it was the last."""
        key = stage, work.step.key
        num_left = self._left.pop(key, len(work.microbatches)) - 1
        if num_left:
            self._left[key] = num_left
        return not num_left
