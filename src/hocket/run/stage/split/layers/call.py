"""One call of a layer whose weight gradient waits for W.

It is made in every forward of every layer, and hears of every backward: nothing here is
done that need not be.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from hocket.errors import ModelError

# The weight's and the bias's gradient; None where it is not wanted.
Pair: TypeAlias = tuple[Tensor | None, Tensor | None]

_detached: Final = Tensor.detach
_version: Final = attrgetter("_version")


class DeferredCall:
    """What a call's weight gradient needs, and the hook that hears the rest of it.

    Args:
        name: of the operator, for errors.
        inputs: the layer's, one or two; kept without the graph that they come from.
        weight: whose gradient is put off; None where it wants none, or not from here.
        bias: likewise.
        formula: from the call and the output's gradient to those of weight and bias.
        more: what else the formula asks for.

    Attributes:
        versions: the inputs', when they were read.
        wants_grad: whether any of the inputs does.
        heard: where it puts itself and the output's gradient, in the backward.
    """

    __slots__ = (
        "bias",
        "formula",
        "heard",
        "inputs",
        "more",
        "name",
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
        """Let go of the graph: a layer must not hold on to those before it."""
        self.name = name
        self.weight = weight
        self.bias = bias
        self.formula = formula
        self.more = more
        self.wants_grad: bool = inputs[0].requires_grad or inputs[-1].requires_grad
        self.inputs: tuple[Tensor, ...] = tuple(map(_detached, inputs))
        self.versions: tuple[int, ...] = tuple(map(_version, self.inputs))
        self.heard: list[tuple[DeferredCall, Tensor]] = []

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        """Hear of the output's gradient.

        Raises:
            ModelError: an input was changed in place; autograd refuses that, too.
        """
        (dy,) = grads
        if dy is not None:
            if tuple(map(_version, self.inputs)) != self.versions:
                self._refuse()
            self.heard.append((self, dy))

    def _refuse(self) -> None:
        """Refuse inputs that are not what the forward has read."""
        for tensor, version in zip(self.inputs, self.versions, strict=True):
            if tensor._version != version:
                raise ModelError(
                    f"the input of {self.name}, shape {tuple(tensor.shape)}, was "
                    "changed in place after the forward had read it: its weight's "
                    f"gradient needs version {version}, it is at {tensor._version}. "
                    "Compute what changes it into a new tensor"
                )


def defers(weight: Tensor) -> bool:
    """Whether a weight's gradient can be put off: a real parameter that wants one."""
    wanted = weight.requires_grad and torch.is_grad_enabled()
    return wanted and weight.is_leaf and weight.is_floating_point()


def detached_weight(parameter: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The values for the graph, and the parameter if its gradient is put off."""
    if parameter is None or not defers(parameter):
        return parameter, None
    return parameter.detach(), parameter


def in_rows(x: Tensor) -> Tensor:
    """All dimensions but the last together."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
