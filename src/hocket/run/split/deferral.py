"""The calls of one stage whose weight gradients wait for W."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hocket.run.split.call import Call
from hocket.run.split.enter import enter
from hocket.run.split.pending import Pending

Routed: TypeAlias = Callable[..., Tensor]


class Deferral:
    """Hears of output gradients in a backward, and hands them over to W.

    One backward of the stage runs at a time; forwards of several microbatches may lie
    before it, for what they leave is in their own graphs.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self._heard: list[tuple[Call, Tensor]] = []
        self._anchor = torch.zeros((), requires_grad=True)

    def enter(
        self, call: Call, compute: Callable[..., Tensor], arguments: tuple[Any, ...]
    ) -> Tensor:
        """Compute a call's output, and put off its weight gradient."""
        wants_grad = call.wants_grad or any(
            isinstance(x, Tensor) and x.requires_grad for x in arguments
        )
        hear = partial(self._hear, call)
        return enter(compute, arguments, wants_grad, self._anchor, hear)

    def take(self) -> Pending:
        """What the backward that has just ended leaves for W."""
        pending = Pending(self._heard)
        self._heard.clear()
        return pending

    def _hear(self, call: Call, grads: tuple[Tensor | None, ...]) -> None:
        (dy,) = grads
        if dy is not None:
            call.check()
            self._heard.append((call, dy))
