"""Divides operators that compute input and weight gradients at once.

    dx, dw, db = convolution_backward(dy, x, w, ..., [True, True, True])

becomes one operator with the mask [True, False, False], and one with what is left. The
others that Inductor leaves whole make no weight's gradient, or cannot make one alone.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

_BOTH: Final = torch.ops.aten.convolution_backward.default
_MASK: Final = 10  # its place among the arguments
_INPUT: Final = 0  # the place of dx among the results


def divide(graph: fx.Graph) -> None:
    """Divide all such operators in a graph."""
    for node in graph.find_nodes(op="call_function", target=_BOTH):
        mask = list(node.args[_MASK])
        if mask[_INPUT] and any(mask[1:]):
            _divide(graph, node, mask)


def _divide(graph: fx.Graph, node: fx.Node, mask: list[bool]) -> None:
    rest = [False, *mask[1:]]
    with graph.inserting_after(node):
        weights = graph.call_function(_BOTH, _with_mask(node.args, rest))
    values = node.meta["val"]
    weights.meta = {**node.meta, "val": (None, *values[1:])}
    node.args = _with_mask(node.args, [True, False, False])
    node.meta = {**node.meta, "val": (values[_INPUT], None, None)}
    for user in list(node.users):
        if user.args[1] != _INPUT:
            user.replace_input_with(node, weights)


def _with_mask(args: tuple[Any, ...], mask: list[bool]) -> tuple[Any, ...]:
    return (*args[:_MASK], mask, *args[_MASK + 1 :])
