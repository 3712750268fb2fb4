"""Evaluation: the same stages in the same places, forward only.

Nets whose outputs the loss reads are evaluated, too. A loss that reads a whole batch is
computed once all microbatches' outputs are there. With replicas, the first one then
evaluates them all, and the others nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from hocket.core.op import Kind, Op
from hocket.core.program import Net, Program, Stage
from hocket.core.schedule import Lane, Schedule
from hocket.model.trace.example import NO_FORM, Form
from hocket.run.comm.step_header import StepHeader
from hocket.run.data.batch import (
    BatchOutput,
    Microbatch,
    count_samples,
    digest,
    joined,
    on_device,
    split_batch,
)
from hocket.run.data.loader import recorded_batches
from hocket.run.data.loss import count_of, zero_losses
from hocket.run.data.metrics import DeviceSums, EvaluationSums, Metrics
from hocket.run.data.reads import parts_of
from hocket.run.data.step_batch import StepBatch
from hocket.run.device.memory import MemoryWatch
from hocket.run.engine.executor import Executor
from hocket.run.engine.gather import (
    CollectedOutputs,
    first_replica_buffers,
    gather_alike,
)
from hocket.run.engine.lanes.play_plan import PlayPlan, Portion, plan_to_play
from hocket.run.engine.lanes.player import Player
from hocket.run.engine.lanes.point_to_point import PointToPoint
from hocket.run.engine.lanes.stage_table import StageTable
from hocket.run.engine.plan import Plan
from hocket.run.stage.recompute import changing_buffers
from hocket.run.stage.runner import StageRunner
from hocket.schedules import make_schedule


@dataclass(eq=False)
class Evaluator:
    """Runs loaders through the stages in evaluation mode.

    Args:
        executor: whose stages and connections are used.
        plan: for training: evaluation uses its placement and microbatches.
        follow_form: called before a batch is played, with its form.
    """

    executor: Executor
    plan: Plan
    follow_form: Callable[[Form], object]

    def __post_init__(self) -> None:
        """Open the channels of evaluations; every worker must call this."""
        schedule = self.plan.schedule
        self._example = self.plan.example
        self._context = replace(self.executor.context, lanes=None)  # all in one
        self.world, self.layout = self._context.world, self._context.layout
        net = schedule.program.nets[-1]
        self._net = net.name
        self._is_whole = net.batch_loss
        self._reads_whole = net.batch_loss or bool(schedule.program.whole_batch_flows)
        self._num_replicas = 1 if self._reads_whole else self.layout.num_pipelines
        self._num_microbatches = (
            net.num_microbatches * self.layout.num_pipelines // self._num_replicas
        )
        self._program = schedule.program
        order = self._forward_only(self._num_microbatches)
        self._channels = PointToPoint(order, self._context, "evaluation ")
        watch = MemoryWatch(schedule, self.plan.costs, self.world, self.layout.device)
        self._on_error = watch.on_error
        self._players: dict[int, Player] = {}
        self._sums = DeviceSums()
        self._outputs: CollectedOutputs | None = None  # where they are asked for
        # A whole batch: microbatches, the model's outputs, and those of other nets.
        self._whole: list[tuple[Microbatch, Any, Sequence[Any]]] = []
        self._number = 0
        self._digest = 0

    def evaluate(
        self, loader: Iterable[Any], metrics: Metrics | None
    ) -> EvaluationSums:
        """Sum losses and metrics over all samples, for every worker.

        Raises:
            ModelError: a batch differs from the example in more than the samples.
            SchemaError: the replicas did not evaluate on the same batches.
        """
        runner = self.executor.runners.get(self._program.num_stages - 1)
        if runner is not None and runner.loss.reads is not None:
            metrics = runner.loss.reads.metrics(metrics)
        self._sums = DeviceSums(metrics)
        self._run(loader)
        parts = gather_alike(self.world, self._sums.read(), self._digest)
        return EvaluationSums(parts, self._sums.error)

    def outputs(self, loader: Iterable[Any]) -> Any:
        """The model's outputs for all samples, in order, on every worker's CPU.

        Raises:
            DataError: the loader is empty.
            ModelError: a batch differs from the example in more than the samples; or
                outputs cannot be joined along dimension 0, or sent.
            SchemaError: the replicas did not evaluate on the same batches.
        """
        collected = self.collect(loader)
        parts = gather_alike(self.world, {"forms": collected.forms()}, self._digest)
        return collected.gather([part["forms"] for part in parts])

    def collect(self, loader: Iterable[Any]) -> CollectedOutputs:
        """Run the model alone; return the outputs that this worker makes."""
        self._outputs = collected = CollectedOutputs(self.world)
        try:
            self._run(loader)
        finally:
            self._outputs = None
        return collected

    def _run(self, loader: Iterable[Any]) -> None:
        """Play all batches of a loader."""
        self._digest = 0
        runners, layout = self.executor.runners.values(), self.layout
        for runner in runners:
            runner.train(mode=False)
        first = layout.ranks_of(layout.device)[0]
        homes = [x for runner in runners for x in changing_buffers(runner.module)]
        try:
            with (
                torch.no_grad(),
                self.executor.whole_weights(),
                first_replica_buffers(homes, self.executor.replicas, first),
            ):
                for batch in recorded_batches(
                    loader, self._context.recorder, self._number, "eval batch"
                ):
                    self._play(batch)
                    if self._outputs is not None:
                        self._outputs.end_batch()
        finally:
            for runner in runners:
                runner.train(mode=runner.training)

    def _play(self, batch: Any) -> None:
        mine, num_samples = self._share(batch)
        salt = digest(batch)
        self._digest = zlib.crc32(salt.to_bytes(4), self._digest)
        if mine:
            sizes = tuple(part.num_samples for part in mine)
            form = self._example.form_of(mine[0].leaves) if mine[0].leaves else NO_FORM
            self.follow_form(form)
            changes = self.executor.changes
            step = StepHeader(
                self._number, salt, num_samples, sizes, changes=changes, form=form
            )
            nets = (net.name for net in self._program.nets)
            batch = dict.fromkeys(nets, StepBatch(step, mine))
            player = self._player(len(mine))
            player.begin(batch)
            player.play(Portion.STEP, self._number, {self._number: batch})
        if self._whole:
            self._add_losses_of_batch()
            self._whole.clear()
        self._number += 1

    def _share(self, batch: Any) -> tuple[tuple[Microbatch, ...], int]:
        """This replica's microbatches; fewer, or none, of a small batch."""
        num_samples = count_samples(batch)
        if not num_samples:
            return (), 0
        num_parts, each = parts_of(
            num_samples, self._num_microbatches, self._num_replicas
        )
        here = on_device(batch, self.world.device)
        parts = split_batch(here, num_parts, self._example)
        first = self.layout.pipeline * each
        return parts[first : first + each], num_samples

    def _player(self, num_microbatches: int) -> Player:
        if num_microbatches not in self._players:
            table = StageTable(
                self._forward_only(num_microbatches),
                self.executor.runners,
                {},
                self._channels,
                on_output=self._on_output,
                evaluates=True,
                wiring=self.executor.wiring,
            )
            self._players[num_microbatches] = table.player(self._on_error, "eval ")
        return self._players[num_microbatches]

    def _forward_only(self, num_microbatches: int) -> PlayPlan:
        program = self._program
        chain = tuple((s, s + 1) for s in range(program.num_stages - 1))
        if program.flows != chain:
            return plan_to_play(_one_by_one(program, num_microbatches))
        schedule = make_schedule(
            "forward-only",
            num_devices=self.layout.num_devices,
            num_microbatches=num_microbatches,
            devices=tuple(stage.device for stage in program.stages),
        )
        return plan_to_play(schedule)

    def _on_output(
        self, microbatch: Microbatch, output: Any, others: Sequence[Any]
    ) -> None:
        if self._outputs is not None:
            self._outputs.add(output)
            return
        if self._reads_whole:
            self._whole.append((microbatch, output, others))
        else:
            self._add_losses(microbatch, output, others)
        self._sums.add_samples(output, microbatch.targets, microbatch.num_samples)

    def _add_losses_of_batch(self) -> None:
        """Add the losses of a batch, once all outputs of it are there."""
        parts, outputs, others = zip(*self._whole, strict=True)
        forms = self._last.loss.others
        read = [
            joined(column) if self._is_whole or form.is_whole else None
            for form, column in zip(forms, zip(*others, strict=True), strict=True)
        ]
        if self._is_whole:
            num_samples = sum(part.num_samples for part in parts)
            part = Microbatch((), joined([x.targets for x in parts]), num_samples)
            self._add_losses(part, joined(outputs), read)
            return
        begins = accumulate((part.num_samples for part in parts), initial=0)
        for part, output, own, begin in zip(
            parts, outputs, others, begins, strict=False
        ):
            end, device = begin + part.num_samples, self.world.device
            rows = torch.arange(begin, end, device=device)
            given = [
                BatchOutput(whole, rows) if form.is_whole else alone
                for form, whole, alone in zip(forms, read, own, strict=True)
            ]
            self._add_losses(part, output, given)

    @property
    def _last(self) -> StageRunner:
        return self.executor.runners[self._program.num_stages - 1]

    def _add_losses(self, part: Microbatch, output: Any, others: Sequence[Any]) -> None:
        last = self._last
        named = last.loss.named(output, part.targets, *others)
        weight = count_of(last.loss.function, part)
        if not weight:
            named = zero_losses(named, (output, *others))
        self._sums.add_losses(named, weight)


def _one_by_one(program: Program, num_microbatches: int) -> Schedule:
    """Return an order of forwards: each device plays one microbatch after the other.

    Args:
        program: any program; its flows are kept.
        num_microbatches: the number of each net.
    """
    stages = tuple(
        Stage(stage.net, stage.device, trainable=False) for stage in program.stages
    )
    nets = tuple(Net(net.name, num_microbatches) for net in program.nets)
    lanes = (
        Lane(
            device,
            0,
            tuple(
                Op(Kind.FORWARD, stage, microbatch)
                for microbatch in range(num_microbatches)
                for stage in program.stages_on[device]
            ),
        )
        for device in range(program.num_devices)
    )
    return Schedule(Program(nets, stages, program.flows), tuple(lanes))
