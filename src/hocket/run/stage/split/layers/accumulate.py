"""Accumulates a parameter's gradient as autograd does at the end of a backward."""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.model.trace.state import gradient_type


def accumulate(parameter: Tensor, grad: Tensor) -> None:
    """Add to `.grad`, and call hooks on the parameter with the whole of `grad`.

    Args:
        parameter: a leaf.
        grad: the gradient of one microbatch; the caller may not use it afterwards.
    """
    so_far = parameter.grad
    is_sparse = grad.is_sparse or (so_far is not None and so_far.is_sparse)
    if is_sparse or has_hooks(parameter):
        torch.autograd.backward(parameter, grad.to(parameter.dtype))
        return
    if grad.dtype is not (wanted := gradient_type(parameter)):
        grad = grad.to(wanted)
    if so_far is None:
        parameter.grad = _laid_out_as(parameter, grad)
    else:
        so_far.add_(grad)


def has_hooks(parameter: Tensor) -> bool:
    """Return whether a parameter has gradient hooks."""
    # There is no public name: torch itself reads this in Tensor.__deepcopy__.
    hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    return bool(hooks)


def _laid_out_as(parameter: Tensor, grad: Tensor) -> Tensor:
    """Return a gradient with its parameter's strides, for fused optimizers."""
    if grad.stride() == parameter.stride():
        return grad
    return torch.empty_like(parameter, dtype=grad.dtype).copy_(grad)
