"""Asks, once per step, what captured steps are fixed for.

form      the batch's shapes, modes, what is trained, options ─▶ a graph for each
changes   attributes, hooks, functions, numbers, tensors      ─▶ no graph is right
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from hocket.model.guards.guards import Guards
from hocket.run.outoforder.capture.trace import PLAIN_VALUES
from hocket.run.outoforder.capture.update import Optimizer, hook_fault
from hocket.run.stage.split.layers.accumulate import has_hooks

Form: TypeAlias = tuple[Any, ...]

# Of an optimizer's groups: what is read at each step, and what schedulers keep there.
_FOLLOWED: Final = {"params", "lr", "param_names", "initial_lr", "max_lr", "min_lr"}
_LEFT_OUT: Final = _FOLLOWED | {"base_momentum", "max_momentum"}


class StepForms:
    """What the captured steps of a model are fixed for.

    Args:
        model: the model.
        optimizer: the optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._guards = Guards(model)
        self._num_hooks, self._is_hooked = -1, False
        self._read()

    def of(self, batch: Any) -> Form:
        """Return what has a graph for each of its values.

        These are the batch's shapes, strides, types and structure, the mode of each
        module, what is trained and autocast; and at last the optimizer's options but
        for learning rates.
        """
        leaves, spec = pytree.tree_flatten(batch)
        kind = self._tensors[0].device.type
        fixed = (
            tuple([module.training for module in self._modules]),
            tuple([x.requires_grad for x in self._tensors]),
            self._has_hooks(),
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        )
        groups = self._optimizer.param_groups
        settings = [
            repr({k: group[k] for k in sorted(group.keys() - _LEFT_OUT)})
            for group in groups
        ]
        lists = tuple([tuple(map(id, group["params"])) for group in groups])
        options = (*settings, lists, hook_fault(self._optimizer))
        return tuple(map(_form_of_leaf, leaves)), spec, fixed, options

    def _has_hooks(self) -> bool:
        """Return whether a weight has hooks; each new one gets a number."""
        if self._num_hooks != RemovableHandle.next_id:
            self._num_hooks = RemovableHandle.next_id
            self._is_hooked = any(map(has_hooks, self._tensors))
        return self._is_hooked

    def changes(self) -> list[str]:
        """Return what is otherwise than when this was last called, a line each."""
        changes = [x for x in self._guards.changes() if not x.is_mode]
        found = [str(change) for change in changes]
        if self._places_now() != self._places:
            found.append("a weight or a buffer is another tensor")
        if len(found) > len(changes) or any(x.kind for x in changes):
            self._read()
        return found

    def _read(self) -> None:
        """Find the modules and tensors, and note where these are."""
        self._modules = [*self._model.modules()]
        homes = [home for x in self._modules for home in (x._parameters, x._buffers)]
        self._homes = [home for home in homes if home]
        self._places = self._places_now()

    def _places_now(self) -> list[tuple[int, int]]:
        every = [x for home in self._homes for x in home.values()]
        self._tensors = [x for x in every if x is not None]
        return [(id(x), x.data_ptr()) for x in self._tensors]


def _form_of_leaf(leaf: Any) -> Form:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return (type(leaf), leaf) if isinstance(leaf, PLAIN_VALUES) else (type(leaf),)
