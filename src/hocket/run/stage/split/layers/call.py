"""One call of a layer whose weight gradient is deferred to W.

It is made in every forward of every layer and called in every backward: it must be
cheap.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from hocket.errors import ModelError

# The weight's and the bias's gradient; None for one that is not wanted.
Pair: TypeAlias = tuple[Tensor | None, Tensor | None]

_detached: Final = Tensor.detach
_version: Final = attrgetter("_version")


class DeferredCall:
    """The operands of a call's weight gradient, and the hook that receives dy.

    Args:
        name: the operator's name, for errors.
        inputs: the layer's one or two inputs; kept without their graph.
        weight: the weight whose gradient is deferred; None if it wants none, or gets it
            from autograd.
        bias: the bias whose gradient is deferred, or None.
        formula: computes the gradients of weight and bias from the call and dy.
        more: further arguments of the formula.

    Attributes:
        versions: the inputs' version counters when they were read.
        wants_grad: whether any of the inputs wants a gradient.
        recorded: the list to which the backward appends this call and dy.
    """

    __slots__ = (
        "bias",
        "formula",
        "inputs",
        "more",
        "name",
        "recorded",
        "versions",
        "wants_grad",
        "weight",
    )

    def __init__(
        self,
        name: str,
        inputs: tuple[Tensor, ...],
        weight: Tensor | None,
        bias: Tensor | None,
        formula: Callable[[DeferredCall, Tensor], Pair],
        more: tuple[Any, ...] = (),
    ) -> None:
        """Detach the inputs: a layer must not keep the graph before it alive."""
        self.name = name
        self.weight = weight
        self.bias = bias
        self.formula = formula
        self.more = more
        self.wants_grad: bool = inputs[0].requires_grad or inputs[-1].requires_grad
        self.inputs: tuple[Tensor, ...] = tuple(map(_detached, inputs))
        self.versions: tuple[int, ...] = tuple(map(_version, self.inputs))
        self.recorded: list[tuple[DeferredCall, Tensor]] = []

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        """Record the output's gradient.

        Raises:
            ModelError: an input was changed in place; autograd refuses that, too.
        """
        (dy,) = grads
        if dy is not None:
            if tuple(map(_version, self.inputs)) != self.versions:
                self._refuse()
            self.recorded.append((self, dy))

    def _refuse(self) -> None:
        """Refuse inputs that changed after the forward had read them."""
        for tensor, version in zip(self.inputs, self.versions, strict=True):
            if tensor._version != version:
                raise ModelError(
                    f"the input of {self.name}, shape {tuple(tensor.shape)}, was "
                    "changed in place after the forward had read it: its weight's "
                    f"gradient needs version {version}, it is at {tensor._version}. "
                    "Compute what changes it into a new tensor"
                )


def defers(weight: Tensor) -> bool:
    """Return whether a weight's gradient can be deferred: a leaf that wants one.

    Not inside `torch.func.grad`, `jvp` and the like: they derive by the weight's uses.
    """
    wanted = weight.requires_grad and torch.is_grad_enabled()
    is_plain = torch._C._functorch.maybe_current_level() is None
    return wanted and is_plain and weight.is_leaf and weight.is_floating_point()


def detached_weight(parameter: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the values for the graph, and the parameter if it is deferred."""
    if parameter is None or not defers(parameter):
        return parameter, None
    return parameter.detach(), parameter


def operands(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return input, weight and bias as the operator reads them, and the deferred bias.

    Under autocast the operator would cast them by itself, but W needs the tensor that
    it read: the cast one, which is kept instead of the original, and not beside it.

    Args:
        x: the layer's input, of any shape.
        weight: the weight, whose gradient is deferred.
        bias: the bias, if the layer has one.
    """
    values, deferred = detached_weight(bias)
    kind = "cpu" if x.is_cpu else x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, weight.detach(), values, deferred
    dtype = torch.get_autocast_dtype(kind)
    short_bias = None if values is None else _short(values, dtype)
    return _short(x, dtype), _short(weight.detach(), dtype), short_bias, deferred


def _short(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor as autocast does; float64 and integers stay as they are."""
    is_cast = tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.to(dtype) if is_cast else tensor


def in_rows(x: Tensor) -> Tensor:
    """Flatten all dimensions but the last."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
