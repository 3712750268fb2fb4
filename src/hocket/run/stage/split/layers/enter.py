"""Enters calls with detached weights into autograd's graph.

Where an input wants a gradient, the operator has a node in the graph as always, which
makes that input's gradient and no other. A hook in front of it gets dy:

    x ─── AddmmBackward ◀── hook ◀── dy

Where no input does (a net's first layer, an embedding), there would be no node at all.
A node of our own takes its place and only passes dy to the hook:

    anchor ─── _Heard ◀── dy
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

# Called with an output's gradient, in a tuple.
Hear: TypeAlias = Callable[[tuple[Tensor | None, ...]], None]


def enter(
    compute: Callable[..., Tensor],
    arguments: tuple[Any, ...],
    on_grad: Hear,
) -> Tensor:
    """Compute a layer's output from inputs of which one wants a gradient.

    Args:
        compute: the operator.
        arguments: the operator's arguments, parameters detached.
        on_grad: called once per backward that comes through here.
    """
    output = compute(*arguments)
    node: Any = output.grad_fn
    # Some operators return a view of what they computed. If that is changed in place,
    # the view's node leaves the graph, but the one behind it stays.
    if output._is_view():
        node = node.next_functions[0][0]
    node.register_prehook(on_grad)
    return output


def enter_alone(
    compute: Callable[..., Tensor],
    arguments: tuple[Any, ...],
    on_grad: Hear,
    anchor: Tensor,
) -> Tensor:
    """Compute a layer's output from inputs of which none wants a gradient.

    Args:
        compute: the operator.
        arguments: the operator's arguments, parameters detached.
        on_grad: called once per backward that comes through here.
        anchor: a leaf that wants a gradient and will get none.
    """
    recorded: Tensor = _GradHook.apply(anchor, compute, arguments, on_grad)  # type: ignore[no-untyped-call]
    return recorded


class _GradHook(torch.autograd.Function):
    """An autograd function without inputs' gradients that passes dy to a hook."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        compute: Callable[..., Tensor],
        arguments: tuple[Any, ...],
        on_grad: Hear,
    ) -> Tensor:
        """Return the output, as a tensor that may be changed in place."""
        ctx.on_grad = on_grad
        output = compute(*arguments)
        if output._is_view():
            output = torch.ops.aten._unsafe_view(output, output.shape)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        """Return no gradients: no input wants one."""
        ctx.on_grad((grad,))
        return None, None, None, None
