"""The plain loop over microbatches, on the user's own modules: nothing of hocket.

With delays, as WPipe and PipeDream-2BW have them, the weights in front of the cut, or
all of them, are read as they were before the last update. Old weights are copied into
the modules before the forward, and the newest ones back behind the backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hocket
from tests.conformance.script import Script


@dataclass
class Trained:
    """What a run comes to.

    Args:
        losses: of each step.
        state: weights and buffers of the model.
        loss_state: the same of the loss, where it has any.
        evaluated: the loss in evaluation mode, at the end; and the metric.
        seen: see `Script`.
    """

    losses: list[float]
    state: dict[str, Tensor]
    loss_state: dict[str, Tensor]
    evaluated: tuple[float, float] | None
    seen: dict[str, list[Any]]


@dataclass
class Plain:
    """Trains a script.

    Args:
        script: what to train; changed.
        net: its model, in the form to train.
        num_parts: microbatches.
        teacher: another run of the same script, whose net is the teacher.
        delays: which weights are one update old: none, those before the cut, all.
        freezes: whether the first layer freezes after two steps.
    """

    script: Script
    net: nn.Module
    num_parts: int
    teacher: Script | None = None
    delays: Literal["none", "front", "all"] = "none"
    freezes: bool = False

    def run(self) -> Trained:
        """Train on all batches."""
        script = self.script
        optimizer = script.optimizer(list(self._parameters()))
        scheduler = script.scheduler and script.scheduler(optimizer)
        old: dict[int, Tensor] = {}
        losses = []
        for step, batch in enumerate(script.batches):
            self._between(step)
            delayed = self._delayed()
            newest = _copies(delayed)
            _put(delayed, old)
            losses.append(self._backward(batch))
            _put(delayed, newest)
            old = newest
            self._clip(delayed.keys())
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            script.after_step(step, self.net)
            if self.teacher is not None and script.teacher_alike:
                self.teacher.after_step(step, self.teacher.net)
        if hasattr(optimizer, "eval"):
            optimizer.eval()
        seen = {name: [*found] for name, found in script.seen.items()}
        state, loss_state = state_of(self.net), state_of(script.own_loss)
        return Trained(losses, state, loss_state, self._evaluated(), seen)

    def _parameters(self) -> Iterator[nn.Parameter]:
        return chain(self.net.parameters(), *(x.parameters() for x in self._losses()))

    def _losses(self) -> Iterator[nn.Module]:
        """The modules that the loss is made of."""
        loss = self.script.own_loss
        given = loss.args if isinstance(loss, partial) else (loss,)
        return (x for x in given if isinstance(x, nn.Module) and x is not self.net)

    def _between(self, step: int) -> None:
        self.script.before_step(step, self.net)
        if self.freezes and step >= 2:
            for name in self.script.frozen:
                frozen = self.net.get_submodule(name).eval()
                frozen.requires_grad_(requires_grad=False)
        if self.teacher is not None and self.script.teacher_alike:
            self.teacher.before_step(step, self.teacher.net)

    def _delayed(self) -> dict[int, nn.Parameter]:
        """By identity: a loop may give a parameter another name."""
        if self.delays == "none":
            return {}
        if self.delays == "all":
            return {id(p): p for p in self._parameters()}
        order = [name for name, _ in self.net.named_modules()]
        cut = order.index(self.script.cut)
        return {
            id(p): p
            for name, p in self.net.named_parameters()
            if order.index(name.rpartition(".")[0]) < cut
        }

    def _backward(self, batch: tuple[Any, Any]) -> float:
        total = 0.0
        for inputs, targets, share in self._parts(batch):
            value = self._loss(inputs, targets)
            (value * share).backward()
            total += value.item() * share
        return total

    def _clip(self, delayed: Collection[int]) -> None:
        """By the norm of all gradients; with delays, of the weights of one delay."""
        if self.script.clip_norm is None:
            return
        every = [*self._parameters()]
        is_front = self.delays == "front"
        for is_old in (True, False) if is_front else (None,):
            group = [p for p in every if is_old in (None, id(p) in delayed)]
            nn.utils.clip_grad_norm_(group, self.script.clip_norm)

    def _parts(self, batch: tuple[Any, Any]) -> Iterator[tuple[Any, Any, float]]:
        """Cut a batch, but for what all samples share."""
        whole = batch[0]
        for inputs, targets, share in parts_of(batch, self.num_parts):
            own = inputs
            if self.script.shared:
                each = enumerate(inputs)
                own = tuple(whole[i] if i in self.script.shared else x for i, x in each)
            yield own, targets, share

    def _loss(self, inputs: Any, targets: Any) -> Tensor:
        output = call(self.net, inputs)
        value = total_of(self.script.loss(output, targets))
        if self.teacher is None:
            return value
        with torch.no_grad():
            taught = call(self.teacher.net, inputs)
        return value + apart(output, taught)

    def _evaluated(self) -> tuple[float, float] | None:
        if not self.script.evaluates:
            return None
        for module in (self.net, *self._losses()):
            module.eval()
        if self.teacher is not None:
            self.teacher.net.eval()
        with torch.no_grad():
            parts = [*self._parts(self.script.batches[0])]
            losses = [self._loss(x, y).item() * share for x, y, share in parts]
            metrics = [self._metric(x, y) * share for x, y, share in parts]
        return sum(losses), sum(metrics)

    def _metric(self, inputs: Any, targets: Any) -> float:
        metric = self.script.metric
        return 0.0 if metric is None else float(metric(call(self.net, inputs), targets))


def call(net: nn.Module, inputs: Any) -> Any:
    """Call a model: a tuple has positional arguments, a mapping has them by name."""
    inputs = pytree.tree_map(_shared, inputs)
    if isinstance(inputs, Mapping):
        return net(**inputs)
    return net(*inputs) if isinstance(inputs, tuple) else net(inputs)


def _shared(value: Any) -> Any:
    """The value itself, of what is declared as shared by all samples."""
    return value.value if isinstance(value, hocket.Shared) else value


def total_of(value: Any) -> Tensor:
    """What is trained, of what a loss returns."""
    if isinstance(value, Tensor):
        return value
    found: Tensor = value["loss"] if "loss" in value else sum(value.values())
    return found


def apart(output: Any, taught: Any) -> Tensor:
    """How far the outputs of two nets are from each other."""
    pairs = zip(pytree.tree_leaves(output), pytree.tree_leaves(taught), strict=True)
    found = [(a - b).square().mean() for a, b in pairs if isinstance(a, Tensor)]
    return torch.stack(found).sum()


def state_of(module: Any) -> dict[str, Tensor]:
    """Copies of all tensors that a module would save."""
    state = module.state_dict() if isinstance(module, nn.Module) else {}
    return {n: x.detach().clone() for n, x in state.items() if isinstance(x, Tensor)}


def parts_of(
    batch: tuple[Any, Any], num_parts: int
) -> Iterator[tuple[Any, Any, float]]:
    """Cut whatever has an entry for each sample; with each part's share of them."""
    if num_parts == 1:
        yield *batch, 1.0
        return
    given = dict(batch[0]) if isinstance(batch[0], Mapping) else batch[0]
    leaves = pytree.tree_leaves(given)
    size = next(len(x) for x in leaves if isinstance(x, Tensor))
    ends = [round(i * size / num_parts) for i in range(num_parts + 1)]
    for begin, end in pairwise(ends):
        rows = slice(begin, end)
        inputs, targets = (_rows(x, rows, size) for x in batch)
        yield inputs, targets, (end - begin) / size


def _rows(value: Any, rows: slice, size: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_rows(x, rows, size) for x in value)
    if isinstance(value, Mapping):
        return {name: _rows(x, rows, size) for name, x in value.items()}
    is_cut = isinstance(value, (Tensor, list)) or _is_array(value)
    return value[rows] if is_cut and _length(value) == size else value


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def _length(value: Any) -> int:
    return 0 if getattr(value, "ndim", 1) == 0 else len(value)


def _copies(parameters: Mapping[int, nn.Parameter]) -> dict[int, Tensor]:
    return {number: p.detach().clone() for number, p in parameters.items()}


def _put(parameters: Mapping[int, nn.Parameter], values: Mapping[int, Tensor]) -> None:
    with torch.no_grad():
        for number, p in parameters.items():
            if number in values:
                p.copy_(values[number])
