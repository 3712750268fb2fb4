"""Weights in bfloat16 that are rounded copies of float32 ones, which are updated.

    weight   bfloat16  ──▶ F, B ──▶ .grad, added up in float32
       ▲ rounded                      │ moved, when a step's are complete
    master   float32   ◀─ optimizer ◀─┘

An update is often smaller than half the distance to the next number in bfloat16 (of 1:
1/256), and would be lost if it were added to the weight itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


class Masters:
    """The masters of some weights.

    Args:
        weights: the model's parameters; those that are trained, in bfloat16, get one.

    Attributes:
        by_weight: the masters, by the identity of their weights.
    """

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        short = {id(x): x for x in weights if has_master(x)}
        self._weights = short
        self.by_weight: Mapping[int, nn.Parameter] = {
            i: nn.Parameter(x.detach().float()) for i, x in short.items()
        }

    def stored(self, tensor: Tensor) -> Tensor:
        """Return the master of a weight, as it is now; of another tensor, itself."""
        if id(tensor) not in self.by_weight:
            return tensor
        self._follow(id(tensor))
        return self.by_weight[id(tensor)]

    def take_gradients(self) -> None:
        """Move the complete gradients of the weights to the masters."""
        for i, weight in self._weights.items():
            self.by_weight[i].grad, weight.grad = weight.grad, None

    def follow(self) -> None:
        """Let masters be what a loop has written into weights, where it has."""
        for i in self._weights:
            self._follow(i)

    def _follow(self, i: int) -> None:
        weight, master = self._weights[i].detach(), self.by_weight[i].detach()
        # Of what is written as `.data` there is no version: bits are compared.
        if weight.device.type == "cpu":
            rounded = torch.empty_like(weight).copy_(master)
            if torch.equal(_bits(rounded), _bits(weight)):
                return
        # On a GPU it is decided there: the host would wait.
        torch.where(weight == master.bfloat16(), master, weight.float(), out=master)

    def write(self) -> None:
        """Write the masters into the weights, rounded to the nearest."""
        if self._weights:
            weights = [x.detach() for x in self._weights.values()]
            masters = [self.by_weight[i].detach() for i in self._weights]
            torch._foreach_copy_(weights, masters)


def has_master(weight: nn.Parameter) -> bool:
    """Return whether a weight is one of those that have masters, where any have."""
    return weight.requires_grad and weight.dtype is torch.bfloat16


def _bits(weight: Tensor) -> Tensor:
    """Return the bits of numbers in bfloat16 as integers, several in one if possible.

    It is the faster to compare the fewer there are.
    """
    is_whole = weight.dim() and weight.is_contiguous() and not weight.shape[-1] % 4
    return weight.view(torch.int64 if is_whole else torch.int16)
