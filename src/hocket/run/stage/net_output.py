"""The structure of a net's output that other nets or a loss over the batch read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.errors import ModelError


@dataclass(frozen=True, slots=True)
class NetOutput:
    """The structure of a net's output that flows to other nets.

    Args:
        spec: puts the leaves back into the model's structure.
        wants_grad: for each leaf, whether it can have a gradient.
    """

    spec: pytree.TreeSpec
    wants_grad: tuple[bool, ...]

    @classmethod
    def of(cls, output: Any, net: str) -> NetOutput:
        """Return the structure of an output.

        Raises:
            ModelError: a leaf is no tensor.
        """
        leaves, spec = pytree.tree_flatten(output)
        if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
            kinds = ", ".join(type(leaf).__name__ for leaf in leaves) or "nothing"
            raise ModelError(
                f"the output of net {net} goes to another stage or to a loss over the "
                f"whole batch, so it must hold tensors only; it holds {kinds}"
            )
        return cls(spec, tuple(torch.is_floating_point(leaf) for leaf in leaves))


def rebuilt(leaves: Iterable[Tensor], outputs: Sequence[NetOutput]) -> list[Any]:
    """Put the leaves of several outputs into their models' structures."""
    left = iter(leaves)
    return [
        pytree.tree_unflatten([next(left) for _ in output.wants_grad], output.spec)
        for output in outputs
    ]
