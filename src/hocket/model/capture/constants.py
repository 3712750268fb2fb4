"""Lets a model read tensors during capture that are the same for every batch.

An exporter knows shapes and no numbers, so reading a number stops it:

    mask = torch.ones(t, t).tril()
    if (mask == other).all():           known, though: it follows from t alone

Tensors made without the batch, the weights and random numbers are computed here when
they are read, from the graph as far as it is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import _disable_current_modes

from hocket.model.trace.replaced import replaced

_LOOKS: Final = ("__bool__", "__float__", "__index__", "__int__", "item")


def constants_shown() -> AbstractContextManager[None]:
    """Answer reads of constants while the block runs; pass on all others."""
    return replaced(Tensor, *_LOOKS, by=_answering)


def _answering(look: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def answer(tensor: Tensor) -> Any:
        node = _node_of(tensor)
        if node is not None:
            # The modes that trace would trace what is computed here, too.
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                value = _computed(node.graph).get(node)
                if value is not None:
                    return look(value)
        return look(tensor)

    return answer


def _node_of(tensor: Tensor) -> fx.Node | None:
    """Return the call that made a tensor, if it is being traced."""
    mode = proxy_tensor.get_proxy_mode()
    if mode is None:
        return None
    slot = proxy_tensor.get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def _computed(graph: fx.Graph) -> dict[fx.Node, Any]:
    """Return all constants of a graph; none if an unknown call changes one."""
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        target, inputs = node.target, node.all_input_nodes
        if node.op != "call_function" or not isinstance(target, OpOverload):
            continue
        is_known = all(x in values for x in inputs)
        is_random = torch.Tag.nondeterministic_seeded in target.tags
        if is_known and not is_random:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = target(*args, **kwargs)
        elif target._schema.is_mutable and any(x in values for x in inputs):
            return {}
    return values
