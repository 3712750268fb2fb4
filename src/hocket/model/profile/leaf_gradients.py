"""The backward of one piece of a model, for measuring and counting."""

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
    """Return gradients of the leaves; compute the weights' too unless `only_inputs`.

    Args:
        leaves: what the piece received.
        outputs: the piece's outputs.
        grads: the gradient of each output.
        only_inputs: whether to skip the weights' gradients.

    Returns:
        One gradient for each leaf, zeros if no output depends on it.
    """
    if not outputs or (only_inputs and not leaves):
        return [torch.zeros_like(x) for x in leaves]
    found: Sequence[Tensor | None]
    if only_inputs:
        found = torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
    else:
        torch.autograd.backward(outputs, grads)
        found = [x.grad for x in leaves]
    return with_zeros(leaves, found)


def with_zeros(
    leaves: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[Tensor]:
    """Return the gradients of leaves, with zeros in place of None."""
    return [
        torch.zeros_like(x) if grad is None else grad
        for x, grad in zip(leaves, grads, strict=True)
    ]
