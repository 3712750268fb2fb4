"""Op L: a loss over the outputs of all microbatches, and its gradients.

    y 0, y 1, y 2  ──▶ joined ──▶ loss ──▶ gradients of y 0, y 1, y 2

A loss over all replicas reads gathered outputs (op G). Each replica computes it, and
keeps the gradient of its own rows, which op R adds up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.run.cluster.group import WorkerGroup
from hocket.run.data.batch import Microbatch, joined
from hocket.run.data.loss import TOTAL
from hocket.run.data.step_batch import NetBatches
from hocket.run.engine.lanes.action import Playing
from hocket.run.engine.lanes.inputs import Input, Key, Values
from hocket.run.engine.lanes.outputs import Output
from hocket.run.stage.loss_checks.step_loss_check import refuse_changes, versions_of
from hocket.run.stage.net_output import NetOutput
from hocket.run.stage.runner import StageRunner
from hocket.run.stage.split.layers.accumulate import accumulate


@dataclass(frozen=True, slots=True)
class LossInput:
    """An output that a loss over the whole batch reads.

    Args:
        net: the net that makes it.
        output: its form.
        source: where it is found.
        wants_grad: whether its net is trained by this loss.
    """

    net: str
    output: NetOutput
    source: Input
    wants_grad: bool


@dataclass(eq=False)
class BatchLoss:
    """Plays op L of one stage.

    Args:
        runner: the stage, whose runner takes the losses.
        inputs: the outputs that the loss reads; the stage's own first.
        own_gradients: where backwards of the stage find the gradients of its outputs.
        replica: this worker's; None where the loss is over its own batch alone.
    """

    runner: StageRunner
    inputs: Sequence[LossInput]
    own_gradients: dict[Key, Values]
    replica: int | None

    def __post_init__(self) -> None:
        """Begin without gradients."""
        # Of other nets' outputs, by step and microbatch: one row for each input.
        self._gradients: dict[Key, Values] = {}

    def play(self, one: Playing) -> None:
        """Compute the loss and its gradients.

        Raises:
            ModelError: outputs cannot be joined; the loss depends on no weight, or
                changes its targets in place.
            NonFiniteError: the loss is not finite.
        """
        batch = one.batch
        taken = [self._take(source, batch) for source in self.inputs]
        one.timer.start()
        leaves = [
            [_as_leaf(x, source.wants_grad) for x in values]
            for source, values in zip(self.inputs, taken, strict=True)
        ]
        if (versions := self.runner.versions) is not None:
            versions.put(batch[self.inputs[0].net].step.number)
        with torch.enable_grad():
            total = self._total(batch, leaves)
        wanted = [x for values in leaves for x in values if x.requires_grad]
        if wanted:
            found = self._gradients_of(total, wanted, batch)
            grads = [
                [next(found) if x.requires_grad else None for x in values]
                for values in leaves
            ]
            self._keep(batch, grads)
        one.timer.end()
        for source in self.inputs:
            self._release(source, batch)

    def _gradients_of(
        self, total: Tensor, outputs: Sequence[Tensor], batch: NetBatches
    ) -> Iterator[Tensor]:
        """Return the outputs' gradients; accumulate those of the loss's own weights.

        Each replica has the whole gradient of a loss over all of them: op R adds its
        share by samples.
        """
        own = [p for p in self.runner.module.parameters() if p.requires_grad]
        found: Sequence[Tensor | None] = torch.autograd.grad(
            total, [*outputs, *own], allow_unused=True
        )
        share = 1.0 if self.replica is None else self._share(batch)
        for p, grad in zip(own, found[len(outputs) :], strict=True):
            if grad is not None:
                accumulate(p, grad * share)
        return (
            torch.zeros_like(x) if dx is None else dx
            for x, dx in zip(outputs, found, strict=False)
        )

    def _share(self, batch: NetBatches) -> float:
        """Return the share of this replica's samples in the step."""
        work = batch[self.inputs[0].net]
        own = sum(part.num_samples for part in work.microbatches)
        return own / work.step.num_samples

    def gradients_of_others(self, batch: NetBatches, microbatch: int) -> Values:
        """Return the gradients of other nets' outputs, which B or I sends on."""
        number = batch[self.inputs[0].net].step.number
        return self._gradients.pop((number, microbatch), ())

    def _take(self, one: LossInput, batch: NetBatches) -> list[Tensor]:
        """Take the leaves of an output: of each microbatch, or gathered."""
        if self.replica is not None:
            return list(one.source.take(batch, 0))
        count = len(batch[one.net].step.sizes)
        return [x for m in range(count) for x in one.source.take(batch, m)]

    def _release(self, one: LossInput, batch: NetBatches) -> None:
        if self.replica is not None:
            one.source.release(batch, 0)
            return
        for microbatch in range(len(batch[one.net].step.sizes)):
            one.source.release(batch, microbatch)

    def _total(self, batch: NetBatches, leaves: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the loss, weighted by its share of the step's samples."""
        work = batch[self.inputs[0].net]
        everywhere = self.replica is not None
        parts: Sequence[Microbatch] = (
            work.everywhere if everywhere else work.microbatches
        )
        outputs = [
            joined(_structures(values, one.output))
            for one, values in zip(self.inputs, leaves, strict=True)
        ]
        targets = joined([part.targets for part in parts])
        versions = versions_of(targets)
        named = self.runner.loss.named(outputs[0], targets, *outputs[1:])
        refuse_changes(work.step.number, versions, targets)
        self.runner.loss.values.take(work.step.number, 0, named)
        share = 1.0 if everywhere else self._share(batch)
        return named[TOTAL] * (share * work.loss_scale)

    def _keep(
        self, batch: NetBatches, grads: Sequence[Sequence[Tensor | None]]
    ) -> None:
        """Hand the gradients on, microbatch by microbatch."""
        own, *others = [
            self._by_microbatch(one, batch, values)
            for one, values in zip(self.inputs, grads, strict=True)
        ]
        number = batch[self.inputs[0].net].step.number
        for microbatch, values in enumerate(own):
            self.own_gradients[number, microbatch] = values
            self._gradients[number, microbatch] = tuple(
                x
                for other, one in zip(others, self.inputs[1:], strict=True)
                for x in _row(other, microbatch, one)
            )

    def _by_microbatch(
        self, one: LossInput, batch: NetBatches, grads: Sequence[Tensor | None]
    ) -> list[Values]:
        work, num_leaves = batch[one.net], len(one.output.wants_grad)
        if self.replica is None:
            return [
                tuple(x for x in grads[begin : begin + num_leaves] if x is not None)
                for begin in range(0, len(grads), num_leaves)
            ]
        count = len(work.microbatches)
        sizes = [part.num_samples for part in work.everywhere]
        here = slice(self.replica * count, (self.replica + 1) * count)
        split = [x.split(sizes)[here] for x in grads if x is not None]
        return [tuple(x[m] for x in split) for m in range(count)]


@dataclass(eq=False)
class Gather:
    """Plays op G: gathers a stage's outputs over replicas, without gradient.

    Args:
        net: the stage's net.
        own: where the stage's outputs are found.
        output: where the gathered ones go.
        group: the stage's replicas.
    """

    net: str
    own: Input
    output: Output
    group: WorkerGroup

    def play(self, one: Playing) -> None:
        """Gather the outputs of all microbatches, in the order of samples."""
        work = one.batch[self.net]
        count = len(work.microbatches)
        parts = [self.own.take(one.batch, m) for m in range(count)]
        one.timer.start()
        rows = [
            sum(part.num_samples for part in work.everywhere[begin : begin + count])
            for begin in range(0, len(work.everywhere), count)
        ]
        gathered = tuple(
            self._gathered(torch.cat(column), rows)
            for column in zip(*parts, strict=True)
        )
        one.timer.end()
        self.output.put(one.batch, one.timer.lane, 0, gathered)

    def _gathered(self, own: Tensor, rows: Sequence[int]) -> Tensor:
        """Gather one leaf; all replicas send equally many rows."""
        most = max(rows)
        padded = own.new_zeros((most, *own.shape[1:]))
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in rows]
        what = f"outputs of net {self.net}"
        self.group.wait(self.group.all_gather(parts, padded, what), what)
        return torch.cat([x[:n] for x, n in zip(parts, rows, strict=True)])


def _as_leaf(value: Tensor, wants_grad: bool) -> Tensor:
    value = value.detach()
    return value.requires_grad_() if wants_grad and value.is_floating_point() else value


def _structures(leaves: Sequence[Tensor], output: NetOutput) -> list[Any]:
    """Put the leaves of several microbatches into the model's structure."""
    each = len(output.wants_grad)
    return [
        pytree.tree_unflatten(list(leaves[begin : begin + each]), output.spec)
        for begin in range(0, len(leaves), each)
    ]


def _row(rows: Sequence[Values], microbatch: int, one: LossInput) -> Values:
    """Return one microbatch's gradients; empty ones where the net has fewer."""
    if not one.wants_grad:
        return ()
    if microbatch < len(rows):
        return rows[microbatch]
    return tuple(torch.empty(0) for flag in one.output.wants_grad if flag)
