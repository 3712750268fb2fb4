"""Collects one stage's calls whose weight gradients wait for W."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hocket.run.stage.split.layers.call import DeferredCall
from hocket.run.stage.split.layers.enter import enter, enter_alone
from hocket.run.stage.split.layers.pending import Pending

Routed: TypeAlias = Callable[..., Tensor]


class Deferral:
    """Records output gradients in a backward, and hands them over to W.

    One backward of the stage runs at a time; forwards of several microbatches may lie
    before it, for what they leave is in their own graphs.
    """

    def __init__(self) -> None:
        """Make an empty one."""
        self._recorded: list[tuple[DeferredCall, Tensor]] = []
        self._anchor = torch.zeros((), requires_grad=True)

    def enter(
        self,
        call: DeferredCall,
        compute: Callable[..., Tensor],
        arguments: tuple[Any, ...],
        bias: Tensor | None = None,
    ) -> Tensor:
        """Compute a call's output, and defer its weight gradient.

        Args:
            call: the call; it gets the output's gradient.
            compute: the operator.
            arguments: the operator's arguments, parameters detached.
            bias: the bias among the arguments, if it wants its gradient at once.
        """
        call.recorded = self._recorded
        if call.wants_grad or (bias is not None and bias.requires_grad):
            return enter(compute, arguments, call)
        return enter_alone(compute, arguments, call, self._anchor)

    def take(self) -> Pending:
        """Return what the backward that has just ended leaves for W."""
        pending = Pending(self._recorded)
        self._recorded.clear()  # the list object stays: all calls refer to it
        return pending
