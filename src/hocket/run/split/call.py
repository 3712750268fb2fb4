"""One call of a layer whose weight gradient waits for W."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from hocket.errors import ModelError

# The weight's and the bias's gradient; None where it is not wanted.
Pair: TypeAlias = tuple[Tensor | None, Tensor | None]


@dataclass(slots=True)
class Call:
    """What a call's weight gradient needs, apart from its output's gradient.

    Args:
        name: of the operator, for errors.
        inputs: the layer's; kept without the graph that they come from.
        weight: whose gradient is put off; None where it wants none, or not from here.
        bias: likewise.
        formula: from the call and the output's gradient to those of weight and bias.

    Attributes:
        versions: the inputs', when they were read.
        wants_grad: whether any of the inputs does.
    """

    name: str
    inputs: tuple[Tensor, ...]
    weight: Tensor | None
    bias: Tensor | None
    formula: Callable[[Call, Tensor], Pair]
    versions: tuple[int, ...] = field(init=False)
    wants_grad: bool = field(init=False)

    def __post_init__(self) -> None:
        """Let go of the graph: a layer must not hold on to those before it."""
        self.wants_grad = any(x.requires_grad for x in self.inputs)
        self.inputs = tuple([x.detach() for x in self.inputs])
        self.versions = tuple([x._version for x in self.inputs])

    @property
    def parameters(self) -> Sequence[Tensor]:
        """Those that get a gradient from it."""
        return [x for x in (self.weight, self.bias) if x is not None]

    def check(self) -> None:
        """Refuse inputs that are not what the forward has read.

        Raises:
            ModelError: one was changed in place; autograd refuses that, too.
        """
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


def cut_off(parameter: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The values for the graph, and the parameter if its gradient is put off."""
    if parameter is None or not defers(parameter):
        return parameter, None
    return parameter.detach(), parameter
