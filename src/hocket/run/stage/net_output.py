"""The structure of a net's output that other nets or a loss over the batch read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.errors import ModelError
from hocket.run.data.batch import Microbatch
from hocket.run.data.batch_output import BatchOutput


@dataclass(frozen=True, slots=True)
class NetOutput:
    """The structure of a net's output that flows to other nets.

    Args:
        spec: puts the leaves back into the model's structure.
        wants_grad: for each leaf, whether it can have a gradient.
        is_whole: whether a reader gets it for the whole batch.
    """

    spec: pytree.TreeSpec
    wants_grad: tuple[bool, ...]
    is_whole: bool = False

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


def example_of(output: Any, num_samples: int, wanted: int) -> Any:
    """Return an example of a net's output for another number of samples.

    Args:
        output: an example; tensors with samples along dimension 0 are repeated or cut.
        num_samples: those of the example.
        wanted: those of the result.
    """

    def resized(leaf: Tensor) -> Tensor:
        if leaf.dim() == 0 or len(leaf) != num_samples or num_samples == wanted:
            return leaf
        return leaf[torch.arange(wanted, device=leaf.device) % num_samples]

    return pytree.tree_map_only(Tensor, resized, output)


def rebuilt(
    leaves: Sequence[Tensor], outputs: Sequence[NetOutput], part: Microbatch
) -> list[Any]:
    """Put the leaves of several outputs into their models' structures.

    Args:
        leaves: the leaves of all outputs, one output after the other.
        outputs: their structures.
        part: the microbatch that reads them.
    """
    left = iter(leaves)
    found = [
        pytree.tree_unflatten([next(left) for _ in output.wants_grad], output.spec)
        for output in outputs
    ]
    if not any(output.is_whole for output in outputs):
        return found
    end = part.first_row + part.num_samples
    rows = torch.arange(part.first_row, end, device=leaves[0].device)
    return [
        BatchOutput(value, rows) if output.is_whole else value
        for value, output in zip(found, outputs, strict=True)
    ]
