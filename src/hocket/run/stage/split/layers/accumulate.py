"""Add a gradient to a parameter's, as autograd would at the end of a backward."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulate(parameter: Tensor, grad: Tensor) -> None:
    """Add up in `.grad`; hooks on the parameter are called, with all of `grad` at once.

    Args:
        parameter: a leaf.
        grad: all that one microbatch has to add; the caller's no more.
    """
    if grad.dtype is not parameter.dtype:
        grad = grad.to(parameter.dtype)
    so_far = parameter.grad
    is_sparse = grad.is_sparse or (so_far is not None and so_far.is_sparse)
    if is_sparse or has_hooks(parameter):
        torch.autograd.backward(parameter, grad)
    elif so_far is None:
        parameter.grad = _laid_out_as(parameter, grad)
    else:
        so_far.add_(grad)


def has_hooks(parameter: Tensor) -> bool:
    """Whether somebody wants to hear of its gradients."""
    # Without a public name: torch itself asks so in Tensor.__deepcopy__ and elsewhere.
    hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    return bool(hooks)


def _laid_out_as(parameter: Tensor, grad: Tensor) -> Tensor:
    """Gradients lie in memory like their parameter, for optimizers that fuse both."""
    if grad.stride() == parameter.stride():
        return grad
    return torch.empty_like(parameter).copy_(grad)
