"""Calls autograd's engine without the slow checks of `torch.autograd.backward`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

# A private function of torch: if it is removed, the public one is used.
_engine: Callable[..., Any] | None = getattr(
    torch.autograd.graph, "_engine_run_backward", None
)


def run_backward(
    starts: Sequence[Tensor] | Sequence[GradientEdge], grads: Sequence[Tensor]
) -> None:
    """Accumulate into `.grad`, as `torch.autograd.backward(starts, grads)` does.

    It first compares each gradient's shape with its start's, as if they were symbols:
    five microseconds, more than a quarter of a short backward. In a pipeline they are
    equal, for a gradient's message has the shapes of the output's, and the engine
    checks again.

    Args:
        starts: where the backward starts.
        grads: the gradient of each start, in its shape.
    """
    if _engine is None:
        torch.autograd.backward(starts, grads)
        return
    _engine(
        tuple(starts),
        tuple(grads),
        False,  # the graph is freed
        False,  # and no graph of the gradients is made
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )
