"""Computes a loss of some of a microbatch's samples, and leaves nothing changed.

A loss may be a module with weights of its own (weights of tasks, centres of classes),
or reach such modules. They are trained as a part of the net's last stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.errors import ModelError
from hocket.model.capture.attribute_writes import preserve_reached
from hocket.model.capture.lost_in_graph import preserve_numbers
from hocket.model.trace.per_sample import num_rows, take_rows
from hocket.model.trace.reached import reached
from hocket.model.trace.state import overwrite
from hocket.run.data.loss import TOTAL, LossFunction
from hocket.run.stage.net_output import user_loss


@contextmanager
def restored_attributes(loss: LossFunction, others: object = None) -> Iterator[None]:
    """Restore what a loss may change: variables, attributes, tensors in reach, ...

    Args:
        loss: the loss.
        others: what may change the same for good, such as an optimizer's function:
            see `preserve_reached`. Tensors stay on the device that they are moved to.
    """
    part, own = loss_part(loss), user_loss(loss)
    found = [x for x in reached(own).values() if type(x) is Tensor]
    before = [(x, x.detach().clone()) for x in (*part.buffers(), *found)]
    try:
        with preserve_reached(part, own, others), preserve_numbers():
            try:
                yield
            finally:
                moved = [(x, {**x._parameters}, {**x._buffers}) for x in part.modules()]
    finally:
        for x, value in before:
            # Writing an equal tensor would invalidate saved ones.
            if not torch.equal(x, value):
                overwrite(x, value)
        for module, parameters, buffers in moved:
            module._parameters.update(parameters)
            for name, held in buffers.items():
                old = module._buffers.get(name)
                if held is not None and old is not None and held.device != old.device:
                    overwrite(held, old)
                    module._buffers[name] = held


@contextmanager
def hooks_kept_apart(model: nn.Module) -> Iterator[None]:
    """Refuse hooks that update weights when a gradient has come, as optimizers do.

    Raises:
        ModelError: one has changed a parameter before training begins.
    """
    hooked = [x for x in model.named_parameters() if x[1]._post_accumulate_grad_hooks]
    before = [x.detach().clone() for _, x in hooked]
    yield
    for (name, x), value in zip(hooked, before, strict=True):
        if not torch.equal(x, value):
            raise ModelError(
                f"a hook of {name} (register_post_accumulate_grad_hook) changes it in "
                "the backward: a pipeline runs backwards to be measured, and others "
                "with the same weights. Give the optimizer as optimizer="
            )


@dataclass(frozen=True, slots=True)
class LossOfRows:
    """The loss of some samples.

    Args:
        value: the loss.
        grads: its gradient in each leaf of the output that has rows, zero in those that
            it does not read.
    """

    value: Tensor
    grads: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class LossTrial:
    """Computes the loss of some of a microbatch's samples.

    Args:
        named: computes the named losses of outputs and targets.
        output: the model's output.
        targets: its targets.
        num_samples: samples of both.
        has_blocks: whether a leaf may have several rows of each sample, such as words.
    """

    named: Callable[[Any, Any], Mapping[str, Tensor]]
    output: Any
    targets: Any
    num_samples: int
    has_blocks: bool = False

    def loss_of(self, rows: Tensor) -> Tensor | None:
        """Return the loss of these samples; None if it cannot be computed."""
        try:
            output, targets = self.taken(self.output, rows), self.targets
            value = self.named(output, self.taken(targets, rows))[TOTAL]
        except Exception:
            return None
        return value if bool(value.isfinite()) else None

    def with_gradients(
        self, rows: Tensor, dtype: torch.dtype | None
    ) -> LossOfRows | None:
        """Return the loss of these samples, and its gradients in the output's leaves.

        Args:
            rows: the samples.
            dtype: the type to compute in; the output's own when None.

        Returns:
            The loss; None if it cannot be computed so.
        """

        def converted(leaf: Any) -> Any:
            is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
            return leaf.detach().to(dtype or leaf.dtype) if is_float else leaf

        try:
            given = pytree.tree_map(converted, self.taken(self.output, rows))
            targets = pytree.tree_map(converted, self.taken(self.targets, rows))
            wanted = [
                leaf.requires_grad_()
                for leaf in pytree.tree_leaves(given)
                if isinstance(leaf, Tensor) and leaf.dim() and leaf.is_floating_point()
            ]
            with torch.enable_grad():
                value = self.named(given, targets)[TOTAL]
            if value.requires_grad and wanted:
                grads = torch.autograd.grad(
                    value, wanted, allow_unused=True, materialize_grads=True
                )
            else:
                grads = (*map(torch.zeros_like, wanted),)
        except Exception:
            return None
        is_finite = all(bool(x.isfinite().all()) for x in (value, *grads))
        return LossOfRows(value.detach(), grads) if is_finite else None

    def in_first_type(
        self, rows: Tensor, types: Sequence[torch.dtype | None]
    ) -> tuple[Tensor, torch.dtype | None] | None:
        """Return the loss in the first type in which `with_gradients` runs."""
        for dtype in types:
            if (found := self.with_gradients(rows, dtype)) is not None:
                return found.value, dtype
        return None

    def rows_of(self, num: int, samples: Tensor) -> Tensor:
        """Return the rows of some samples in a leaf of so many rows.

        Raises:
            ValueError: the samples have no equal number of rows.
        """
        if num % self.num_samples:
            raise ValueError(num)
        return torch.arange(num).view(self.num_samples, -1)[samples].flatten()

    def taken(self, structure: Any, rows: Tensor) -> Any:
        """Return the rows of every leaf that has samples.

        Raises:
            ValueError: a leaf's first dimension is not the samples'.
        """

        def taken(leaf: Any) -> Any:
            found = num_rows(leaf)
            if found is None:
                return leaf
            if found != self.num_samples and not (found and self.has_blocks):
                raise ValueError(found)
            return take_rows(leaf, self.rows_of(found, rows))

        return pytree.tree_map(taken, structure)


def loss_part(loss: LossFunction, nets: Iterable[nn.Module] = ()) -> nn.Module:
    """Return a module of all modules and parameters that belong to a loss.

    It is the loss itself if that is a module, which holds nothing of the nets.

    Args:
        loss: the user's.
        nets: the nets that are no part of it, although it may hold them.
    """
    own = user_loss(loss)
    foreign = {id(x) for net in nets for x in (*net.parameters(), *net.buffers())}
    found = reached(own)
    first = found.get("")
    if isinstance(first, nn.Module) and len(found) == 1 and _is_own(first, foreign):
        return first
    part = nn.Module()
    for path, value in found.items():
        _add(part, path.split(".") if path else [], value, foreign)
    return part


def loss_name(nets: Iterable[nn.Module], others: Iterable[str] = ()) -> str:
    """Return what comes before the names of a loss's state: `loss`, if it is free.

    Args:
        nets: the nets whose state has names beside it.
        others: names that are taken, of teachers.
    """
    taken = {name for net in nets for name, _ in net.named_children()} | {*others}
    name = "loss"
    while name in taken:
        name += "_"
    return name


def _is_own(module: nn.Module, foreign: set[int]) -> bool:
    return foreign.isdisjoint(map(id, (*module.parameters(), *module.buffers())))


def _add(
    part: nn.Module, path: list[str], value: nn.Module | Tensor, foreign: set[int]
) -> None:
    """Add a module at a path; of one that holds a net, the rest of it."""
    if isinstance(value, nn.Module):
        if path and _is_own(value, foreign):
            _container(part, path[:-1])._modules[path[-1]] = value
            return
        children = value._modules.items()
        inside = {**value._parameters, **{n: x for n, x in children if x is not None}}
        for name, x in inside.items():
            if x is not None:
                _add(part, [*path, name], x, foreign)
    elif isinstance(value, nn.Parameter) and id(value) not in foreign:
        _container(part, path[:-1])._parameters[path[-1]] = value


def _container(part: nn.Module, path: list[str]) -> nn.Module:
    for key in path:
        found = part._modules.get(key)
        if found is None:
            found = part._modules[key] = nn.Module()
        part = found
    return part
