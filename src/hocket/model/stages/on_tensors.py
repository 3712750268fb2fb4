"""Moves a captured model to other tensors: on `meta`, or partly on a worker's own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hocket.model.capture.captured import Captured
from hocket.model.trace.flow import TraceFlow


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
    if isinstance(tensor, nn.Parameter):
        found = nn.Parameter(empty, tensor.requires_grad)
        found.grad_dtype = tensor.grad_dtype
        return found
    return empty
