"""The backward of one piece of a model, while it is measured or counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gradients_of(
    leaves: Sequence[Tensor],
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    only_inputs: bool,
) -> Sequence[Tensor]:
    """Gradients of the leaves; of the weights too unless only inputs are asked for.

    Args:
        leaves: what the piece received.
        outputs: what it made of them.
        grads: of each output.
        only_inputs: leave the weights' gradients alone.

    Returns:
        One for each leaf, zeros where no output depends on it.
    """
    if not outputs or (only_inputs and not leaves):
        return [torch.zeros_like(x) for x in leaves]
    found: Sequence[Tensor | None]
    if only_inputs:
        found = torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
    else:
        torch.autograd.backward(outputs, grads)
        found = [x.grad for x in leaves]
    return [
        torch.zeros_like(x) if grad is None else grad
        for x, grad in zip(leaves, found, strict=True)
    ]
