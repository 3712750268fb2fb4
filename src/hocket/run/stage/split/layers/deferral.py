"""Collects one stage's calls whose weight gradients wait for W.

Where an input wants a gradient, the operator has a node in the graph as always, which
makes that input's gradient and no other. A hook in front of it receives dy:

    x ─── AddmmBackward ◀── hook ◀── dy

Where no input does (a net's first layer, an embedding), there would be no node at all.
A node of our own takes its place and only passes dy to the hook:

    anchor ─── _GradHook ◀── dy
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from hocket.run.stage.split.layers.call import DeferredCall
from hocket.run.stage.split.layers.pending import Pending

Routed: TypeAlias = Callable[..., Tensor]


class Deferral:
    """Records output gradients in a backward, and passes them on to W.

    One backward of the stage runs at a time; forwards of several microbatches may lie
    before it, since their calls are in their own graphs.
    """

    def __init__(self) -> None:
        """Make an empty one."""
        self._recorded: list[tuple[DeferredCall, Tensor]] = []
        # A leaf that wants a gradient and never gets one.
        self._anchor = torch.zeros((), requires_grad=True)

    def enter(
        self,
        call: DeferredCall,
        compute: Routed,
        arguments: tuple[Any, ...],
        bias: Tensor | None = None,
    ) -> Tensor:
        """Compute a call's output, and defer its weight gradient.

        Args:
            call: the call; it receives the output's gradient in each backward.
            compute: the operator.
            arguments: the operator's arguments, parameters detached.
            bias: the bias among the arguments, if it wants its gradient at once.
        """
        call.recorded = self._recorded
        if not call.wants_grad and (bias is None or not bias.requires_grad):
            return _enter_alone(self._anchor, compute, arguments, call)
        output = compute(*arguments)
        node: Any = output.grad_fn
        # Some operators return a view of what they computed. If that is changed in
        # place, the view's node leaves the graph, but the one behind it stays.
        if output._is_view():
            node = node.next_functions[0][0]
        node.register_prehook(call)
        return output

    def take(self) -> Pending:
        """Return what the backward that has just ended leaves for W."""
        pending = Pending(self._recorded)
        self._recorded.clear()  # the list object stays: all calls refer to it
        return pending


class _GradHook(torch.autograd.Function):
    """An autograd function without inputs' gradients that passes dy to a hook."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        compute: Routed,
        arguments: tuple[Any, ...],
        on_grad: DeferredCall,
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


_enter_alone: Final[Routed] = _GradHook.apply
