"""Plays the ops of waves in the two lanes of one device."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any, get_args

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hocket.core.op import Kind, Op
from hocket.errors import ConfigError
from hocket.model.trace.observe import in_mode
from hocket.model.trace.per_sample import tensors_in
from hocket.run.cluster.group import WorkerGroup
from hocket.run.cluster.layout import Layout
from hocket.run.cluster.world import World
from hocket.run.data.batch import (
    Microbatch,
    call_arguments,
    count_samples,
    digest,
    on_device,
    split_batch,
)
from hocket.run.data.loss import TOTAL, LossFunction, count_of, losses_of, zero_losses
from hocket.run.data.metrics import DeviceSums, EvaluationSums, Metrics
from hocket.run.data.reads import parts_of
from hocket.run.device.device import Device, DeviceLane, Event, IssueOrder
from hocket.run.engine.gather import first_replica_buffers, gather_alike
from hocket.run.stage.precision import Precision
from hocket.run.stage.seed import step_seed
from hocket.run.weights.reduce import Reducer
from hocket.sharing.waves.order import (
    NUM_WAVES,
    SyncName,
    WaveOp,
    last_microbatch,
    ops_of_step,
)
from hocket.sharing.waves.wave import (
    DrawDetector,
    Due,
    LoopChanges,
    Wave,
    WaveStep,
    mean_gradients,
    sum_gradients,
    tensors_of,
)


@dataclass(frozen=True, slots=True)
class WaveSettings:
    """What is played, the same on every worker.

    Args:
        sync: see `order.py`.
        num_microbatches: the parts of each batch on each replica.
        clip_norm: the largest norm of what an update applies, if it is clipped.
        seed: the seed of random numbers in forwards.
        timeout_s: after which a wait for another lane ends in an error.
        precision: the type that forwards compute in.
    """

    sync: SyncName
    num_microbatches: int
    clip_norm: float | None
    seed: int
    timeout_s: float
    precision: Precision = Precision.FLOAT32


@dataclass(eq=False)
class WavePlayer:
    """Plays the ops of two waves.

    Args:
        waves: tick and tock.
        loss: as for `Waves`.
        settings: what is played.
        device: has a lane for each wave; closed by the caller.
        layout: this worker's replica.
        group: all replicas; None where there is one.

    Attributes:
        settings: what is played.
        due: the gradients that updates are to read, by step and wave.
        scale: the loss scale, for float16.
    """

    waves: tuple[Wave, Wave]
    loss: LossFunction
    settings: WaveSettings
    device: Device
    layout: Layout
    group: WorkerGroup | None

    def __post_init__(self) -> None:
        # By step and wave: the other wave may be a step ahead of an update.
        self.due: dict[tuple[int, int], Due] = {}
        self._events: dict[Op, Event] = {}
        self.scale = self.settings.precision.make_scale(self.device.torch_device)
        first = self.waves[0].parameters[0].dtype
        self._loss_type = torch.promote_types(first, torch.float32)
        # By wave and number of losses, which travel with the gradients.
        self._reducers: dict[tuple[int, int], tuple[Reducer, nn.Parameter]] = {}
        self._draws_in_backward: bool | None = None  # not known before the first one
        self._changes = LoopChanges(self.waves, is_exact=self.settings.sync == "exact")

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scale's state, for float16."""
        return None if self.scale is None else self.scale.scaler

    def begin(self, number: int, batch: Any) -> WaveStep:
        """Cut the batch of a step.

        Raises:
            DataError: it is no pair, or has too few samples.
        """
        num = self.settings.num_microbatches
        own, spec = self._own_parts(batch, num * self.layout.num_pipelines, num)
        return WaveStep(number, own, spec, count_samples(batch))

    def _own_parts(
        self, batch: Any, num_parts: int, each: int
    ) -> tuple[tuple[Microbatch, ...], pytree.TreeSpec]:
        """Return this replica's parts of a batch, and how leaves are arguments."""
        parts = split_batch(on_device(batch, self.device.torch_device), num_parts)
        begin = self.layout.pipeline * each
        spec = pytree.tree_structure(call_arguments(batch[0]))
        return parts[begin : begin + each], spec

    def submit(self, steps: Sequence[WaveStep], *, is_idle: bool) -> None:
        """Submit the ops of some steps; they run while this returns, but forwards.

        Args:
            steps: the next ones.
            is_idle: whether no other step is under way.

        Raises:
            ModelError: the loop has changed what cannot be followed.
        """
        settings = self.settings
        if steps:
            self._changes.note()
            self._changes.refuse(steps[0].number, is_idle=is_idle)
            if self._changes.noted:
                self.device.synchronize(settings.timeout_s)
                self._changes.follow()
        ops = [
            (placed, step)
            for step in steps
            for placed in ops_of_step(
                settings.sync, step.number, settings.num_microbatches
            )
        ]
        if self.device.issue_order is IssueOrder.SIDE_LANES_FIRST:
            ops.sort(key=lambda one: -one[0].lane)
        self._events |= {placed.op: self.device.new_event() for placed, _ in ops}
        self.device.fork()
        for placed, step in ops:
            self.device.lanes[placed.lane].submit(
                partial(self._do, placed, step),
                waits=[self._events[op] for op in placed.after if op in self._events],
                records=[self._events[placed.op]],
                label=str(placed.op),
            )
        if self.device.torch_device.type == "cpu":
            self._await_draws([placed.op for placed, _ in ops])
        self._changes.forget()  # those of tick's forwards, which have run
        oldest = max((step.number for step in steps), default=0) - NUM_WAVES
        for op in [op for op in self._events if op.step < oldest]:
            del self._events[op]

    def finish(self, step: WaveStep) -> None:
        """Wait until a step is done.

        Raises:
            WaitError: it is not within the timeout.
            BaseException: the first error of a lane.
        """
        event = self._events[Op(Kind.UPDATE, 0, None, step.number)]
        event.synchronize(self.settings.timeout_s)

    def resume(self, due: Mapping[tuple[int, int], Due]) -> None:
        """Forget what was played, after another state was loaded.

        Args:
            due: the gradients that the next update reads.
        """
        self._events.clear()
        self.due = dict(due)

    def evaluate(
        self, loader: Iterable[Any], metrics: Metrics | None, world: World
    ) -> EvaluationSums:
        """Sum tick's losses and metrics over all samples, for every worker.

            batch   part 0 | part 1   ─▶ rank 0
                    part 2 | part 3   ─▶ rank 1

        Args:
            loader: yields the same batches on every worker.
            metrics: as for `Waves.evaluate`.
            world: the job.

        Raises:
            SchemaError: the workers did not evaluate on the same batches.
        """
        module, sums, seen = self.waves[0].module, DeviceSums(metrics), 0
        homes = [
            (part._buffers, key)
            for part in module.modules()
            for key, x in part._buffers.items()
            if x is not None
        ]
        self._changes.note()
        with (
            in_mode(module, training=False),
            first_replica_buffers(homes, self.group, 0),
            torch.no_grad(),
        ):
            for batch in loader:
                seen = zlib.crc32(digest(batch).to_bytes(4), seen)
                self._evaluate_batch(module, batch, sums)
        self._changes.forget()  # those of these forwards
        return EvaluationSums(gather_alike(world, sums.read(), seen), sums.error)

    def _evaluate_batch(self, module: nn.Module, batch: Any, sums: DeviceSums) -> None:
        """Add this worker's part of a batch; a small one may have none for it."""
        if not (num_samples := count_samples(batch)):
            return
        num, num_replicas = self.settings.num_microbatches, self.layout.num_pipelines
        parts, spec = self._own_parts(batch, *parts_of(num_samples, num, num_replicas))
        for part in parts:
            add_part(module, self.loss, self.settings.precision, part, spec, sums)

    def _await_draws(self, ops: Sequence[Op]) -> None:
        """Wait for the ops that hold torch's default generator: the caller uses it."""
        held = {Kind.FORWARD}
        if self._draws_in_backward is not False:
            held.add(Kind.BACKWARD)
        for op in ops:
            if op.kind in held:
                self._events[op].synchronize(self.settings.timeout_s)

    def _do(self, placed: WaveOp, step: WaveStep) -> None:
        """Do one op, in its lane."""
        lane = self.device.lanes[placed.lane]
        match placed.op.kind:
            case Kind.FORWARD:
                self._forward(placed.op, step, lane)
            case Kind.BACKWARD:
                self._backward(placed.op, step, lane)
            case _:
                self._update(step, lane)

    def _forward(self, op: Op, step: WaveStep, lane: DeviceLane) -> None:
        wave, other = self.waves[lane.number], self.waves[1 - lane.number]
        number = op.microbatch or 0
        part = step.parts[number]
        lane.keep_alive(tensors_in((part.leaves, part.targets)))
        if self.settings.sync == "exact" and number:
            wave.share_buffers_of(other)  # which did the microbatch before
            if lane.number:
                wave.share_weights_of(other)
        args, kwargs = pytree.tree_unflatten(part.leaves, step.spec)
        short = self.settings.precision.autocast(self.device.torch_device, caches=False)
        with self.device.fork_rng(lane, self._seed_of(op)), short:
            output = wave.module(*args, **kwargs)
            losses = losses_of(self.loss, output, part.targets)
        share = part.num_samples / step.num_samples
        factor = 1.0 if self.scale is None else self.scale.value
        step.totals[number] = losses[TOTAL] * (share * factor)
        values = torch.stack(
            [x.detach().to(self._loss_type) * share for x in losses.values()]
        )
        step.names = tuple(losses)
        if step.losses is None:
            step.losses = values
        else:  # may be of the other lane's stream
            lane.keep_alive([step.losses])
            step.losses = step.losses + values

    def _backward(self, op: Op, step: WaveStep, lane: DeviceLane) -> None:
        total = step.totals.pop(op.microbatch or 0)
        holds = self._draws_in_backward is not False
        draws = DrawDetector() if self._draws_in_backward is None else None
        with (
            self.device.fork_rng(lane, self._seed_of(op)) if holds else nullcontext(),
            draws or nullcontext(),
            torch.autograd.set_multithreading_enabled(False),
        ):
            total.backward()
        if draws is not None:
            self._draws_in_backward = bool(self._draws_in_backward) or draws.has_drawn
        settings = self.settings
        last = last_microbatch(settings.sync, lane.number, settings.num_microbatches)
        if op.microbatch == last:
            wave = self.waves[lane.number]
            self.due[step.number, lane.number] = wave.take_gradients(step.num_samples)

    def _update(self, step: WaveStep, lane: DeviceLane) -> None:
        wave, number, side = self.waves[lane.number], step.number, 1 - lane.number
        if self.settings.sync == "exact":
            own, other = self.due.pop((number, 0)), self.due.pop((number, 1))
            lane.keep_alive(tensors_of(other.gradients))
            wave.put_gradients(sum_gradients(own, other))
            wave.share_buffers_of(self.waves[side])
        else:  # this step's gradients are read once more, by the next one
            before = self.due.pop((number - 1, side), None)
            lane.keep_alive([] if before is None else tensors_of(before.gradients))
            own = self.due[number, lane.number]
            wave.put_gradients(mean_gradients(own, before))
        self._reduce(step, lane.number)
        assert wave.updater is not None
        step.norm = wave.updater.clip(self.settings.clip_norm, self.scale)
        if self.scale is not None:
            step.is_skipped = not isfinite(step.norm.item())
            self.scale.update(overflowed=step.is_skipped)
        if step.is_skipped:
            wave.updater.forget()
            return
        wave.updater.update()
        if self.settings.sync == "wave":
            wave.skip_batch()

    def _reduce(self, step: WaveStep, number: int) -> None:
        """Sum gradients and losses over the replicas, in one all-reduce."""
        if self.group is None:
            return
        assert step.losses is not None
        key = number, len(step.names)
        if key not in self._reducers:
            carrier = nn.Parameter(torch.zeros_like(step.losses))
            parameters = [*self.waves[number].parameters, carrier]
            what = f"gradients of wave {number}"
            self._reducers[key] = Reducer(parameters, self.group, what), carrier
        reducer, carrier = self._reducers[key]
        carrier.grad = step.losses
        reducer.start()
        reducer.finish()
        step.losses, carrier.grad = carrier.grad, None

    def _seed_of(self, op: Op) -> int:
        """Return the seed of a microbatch, numbered over all replicas."""
        num = self.settings.num_microbatches
        microbatch = self.layout.pipeline * num + (op.microbatch or 0)
        return microbatch_seed(self.settings.seed, op.step, microbatch)


def microbatch_seed(seed: int, step: int, microbatch: int) -> int:
    """Return the seed of the forward of a microbatch.

    Args:
        seed: the run's seed.
        step: the step's number.
        microbatch: the microbatch's number in the step, over all replicas.
    """
    return step_seed(step_seed(seed, step), microbatch)


# Refuses what waves cannot do.
def checked_microbatches(sync: str, num_microbatches: int | None) -> int:
    """Return the number of microbatches.

    Raises:
        ConfigError: `sync` is unknown, or the number is not possible with it.
    """
    if sync not in get_args(SyncName):
        raise ConfigError(f"sync={sync!r}: it may be {', '.join(get_args(SyncName))}")
    if num_microbatches is None:
        return NUM_WAVES if sync == "exact" else 1
    if num_microbatches < 1:
        raise ConfigError(f"num_microbatches is {num_microbatches}: at least 1")
    if sync == "exact" and num_microbatches % NUM_WAVES:
        raise ConfigError(
            f"num_microbatches is {num_microbatches}, and with sync='exact' the two "
            f"waves take turns: use an even number, such as {num_microbatches + 1}, or "
            "sync='wave', whose batches go whole to one wave"
        )
    return num_microbatches


def refuse_precision(sync: str, precision: Precision) -> None:
    """Refuse a loss scale that is judged too late, and masters.

    Raises:
        ConfigError: sync is "wave", and forwards compute in float16; or there are to be
            masters.
    """
    if precision.has_masters:
        raise ConfigError(
            "waves update weights in bfloat16 themselves, without masters: take "
            'a model in float32 and precision="bfloat16"'
        )
    if sync == "wave" and precision is Precision.FLOAT16:
        raise ConfigError(
            'precision="float16" with sync="wave": an update reads the gradients of '
            "two batches. Whether the newer one has overflowed its loss scale is known "
            "when the next batch has begun with that scale, and its update reads the "
            'same gradients again: take precision="bfloat16", which needs no scale, or '
            "sync='exact', whose updates end each batch"
        )


def add_part(
    module: nn.Module,
    loss: LossFunction,
    precision: Precision,
    part: Microbatch,
    spec: pytree.TreeSpec,
    sums: DeviceSums,
) -> Any:
    """Add a part of a batch to the sums; return the model's output.

    Args:
        module: the model, in evaluation mode.
        loss: as for `Waves`.
        precision: the type that forwards compute in.
        part: on the model's device.
        spec: how its leaves are the model's arguments.
        sums: get the losses and metrics.
    """
    args, kwargs = pytree.tree_unflatten(part.leaves, spec)
    device = next(module.parameters()).device
    with precision.autocast(device, caches=False):
        output = module(*args, **kwargs)
        named = losses_of(loss, output, part.targets)
    weight = count_of(loss, part)
    sums.add_losses(named if weight else zero_losses(named, output), weight)
    sums.add_samples(output, part.targets, part.num_samples)
    return output
