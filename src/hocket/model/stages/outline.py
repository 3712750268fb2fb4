"""The uncut model's names, shapes and types, without values.

Each worker trains its own stages. Keeping the whole model for its names would keep the
other workers' weights in memory.

A captured model moves to other tensors: on `meta`, or partly on a worker's own.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hocket.model.capture.captured import Captured
from hocket.model.stages.saved_modules import SavedModules, state_names
from hocket.model.trace.flow import TraceFlow
from hocket.model.trace.state import State


@dataclass(frozen=True, slots=True)
class Outline:
    """The uncut model, without its values.

    Args:
        state: its parameters and buffers, on the meta device.
        names: the names in its `state_dict()`, in that order.
        modules: its modules with an extra state or hooks of their own.
        kind: the name of its class.
        config: the config of a model of the transformers library; None for any other.
    """

    state: State
    names: tuple[str, ...]
    modules: SavedModules
    kind: str
    config: Any

    @classmethod
    def of(cls, model: nn.Module) -> Outline:
        """Return a model's outline, which does not refer to the model's tensors.

        Raises:
            ModelError: a module saves more than parameters, buffers and extra state.
        """
        state = State.of(model)
        tensors = {name: on_meta(tensor) for name, tensor in state.tensors.items()}
        config: Any = getattr(model, "config", None)
        return cls(
            replace(state, tensors=tensors),
            state_names(model, state),
            SavedModules({"": model}),
            type(model).__name__,
            config if hasattr(config, "to_json_string") else None,
        )

    def joined(self, others: Mapping[str, Outline]) -> Outline:
        """Return this outline with those of other models, under names of their own.

        Args:
            others: by the name that comes before theirs, and a dot.
        """
        state, names = self.state, self.names
        for name, other in others.items():
            state = state.joined(name, other.state)
            names += tuple(f"{name}.{x}" for x in other.names)
        modules = self.modules.joined({key: x.modules for key, x in others.items()})
        return replace(self, state=state, names=names, modules=modules)

    @property
    def parameter_bytes(self) -> int:
        """The bytes of all parameters together."""
        return sum(
            tensor.nbytes
            for name, tensor in self.state.tensors.items()
            if self.state.is_parameter(name)
        )

    def num_parameters(self, frozen: Collection[str]) -> tuple[int, int]:
        """Return how many numbers train, and how many do not.

        Args:
            frozen: the names in frozen stages, which do not train.
        """
        stopped, counts = {*frozen}, [0, 0]
        for name, tensor in self.state.tensors.items():
            if self.state.is_parameter(name):
                is_frozen = name in stopped or not tensor.requires_grad
                counts[is_frozen] += tensor.numel()
        return counts[0], counts[1]

    def tensor(self, name: str) -> Tensor:
        """Return a tensor on `meta`, by any of its names."""
        return self.state.tensors[self.state.first_name[name]]


def on_tensors(
    captured: Captured, tensors: Mapping[str, Tensor], live: nn.Module | None = None
) -> Captured:
    """Return the same model with these parameters and buffers; others are on `meta`.

    Modules that run as they are become copies, which keep these tensors. Nothing of
    the result holds on to the tensors of `captured`.

    Args:
        captured: the model.
        tensors: parameters and buffers, by first name.
        live: the model whose own modules take the place of copies; one without any
            leaves them out.
    """
    state = captured.state
    new = {
        name: tensors[name] if name in tensors else on_meta(old)
        for name, old in state.tensors.items()
    }
    # Copying replaces the old tensors by the new ones in all references.
    copies: dict[int, Any] = {id(old): new[name] for name, old in state.tensors.items()}
    is_outline = all(x.is_meta for x in state.tensors.values())  # holds no values
    model = live
    if model is None:
        keeps = is_outline and not captured.as_is
        model = captured.model if keeps else copied(captured.model, copies)
    changed = replace(state, tensors=new)

    modules = None if live is None else dict(live.named_modules())

    def placed(found: Any, path: str | None) -> Any:
        if path is not None and modules is not None:
            return modules.get(path)
        if isinstance(found, nn.Module):
            return copied(found, copies)
        return copies.get(id(found), found)

    def moved(flow: TraceFlow) -> TraceFlow:
        calls = (x for x in flow.trace.calls if x.op == "call_module")
        paths = {x.target: flow.trace.path_of(x) for x in calls}
        objects = {
            target: placed(x, paths.get(target))
            for target, x in flow.trace.objects.items()
        }
        trace = replace(flow.trace, state=changed, objects=objects)
        return replace(flow, trace=trace)

    return replace(
        captured,
        model=model,
        example=captured.example.mapped(lambda x: x.detach().to("meta")),
        state=changed,
        training=moved(captured.training),
        evaluation=moved(captured.evaluation),
    )


def copied(model: nn.Module, copies: dict[int, Any]) -> Any:
    """Return a deep copy of a module, also of one that is pruned or keeps a graph.

    Args:
        model: the module.
        copies: what takes the place of some objects, by identity; grows.
    """
    for module in model.modules():
        for x in vars(module).values():
            if isinstance(x, Tensor) and not x.is_leaf:
                copies.setdefault(id(x), x.detach().clone())
    return copy.deepcopy(model, copies)


def on_meta(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and type on `meta`; a parameter stays one."""
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    return _as_parameter(empty, tensor)


def aliased(tensor: Tensor) -> Tensor:
    """Return another tensor in the same memory; a parameter stays one."""
    return _as_parameter(tensor.detach(), tensor)


def _as_parameter(new: Tensor, tensor: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return new
    found = nn.Parameter(new, tensor.requires_grad)
    found.grad_dtype = tensor.grad_dtype
    return found
