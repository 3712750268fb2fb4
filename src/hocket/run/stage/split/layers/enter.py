"""How a call whose weights are cut off comes into autograd's graph.

Where an input wants a gradient, the operator has a node in the graph as always, which
makes that input's gradient and no other. A hook in front of it hears the output's:

    x ─── AddmmBackward ◀── hook ◀── dy

Where no input does (a net's first layer, an embedding), there would be no node at all.
A node of our own stands there, which only hears:

    anchor ─── _Heard ◀── dy
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

# Told of an output's gradient: a tuple of one.
Hear: TypeAlias = Callable[[tuple[Tensor | None, ...]], None]


def enter(
    compute: Callable[..., Tensor],
    arguments: tuple[Any, ...],
    on_grad: Hear,
) -> Tensor:
    """Compute a layer's output from inputs of which one wants a gradient.

    Args:
        compute: the operator.
        arguments: its own, parameters detached.
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
        arguments: its own, parameters detached.
        on_grad: called once per backward that comes through here.
        anchor: a leaf that wants a gradient and will get none.
    """
    heard: Tensor = _GradHook.apply(anchor, compute, arguments, on_grad)  # type: ignore[no-untyped-call]
    return heard


class _GradHook(torch.autograd.Function):
    """Computes something without a graph, and hears of its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        compute: Callable[..., Tensor],
        arguments: tuple[Any, ...],
        on_grad: Hear,
    ) -> Tensor:
        """The output, as a tensor that others may change in place."""
        ctx.on_grad = on_grad
        output = compute(*arguments)
        if output._is_view():
            output = torch.ops.aten._unsafe_view(output, output.shape)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        """Nobody wants to know more."""
        ctx.on_grad((grad,))
        return None, None, None, None
