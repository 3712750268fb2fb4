"""The output of another net for the whole batch, of which a microbatch is a part."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True, eq=False)
class _Whole:
    """Holds an output; two are equal if they hold the same tensors.

    pytree compares what a node holds with `==`, which tensors answer for each element.
    """

    output: Any

    def __eq__(self, other: object) -> bool:
        """Compare tensors by identity, not by their values."""
        if not isinstance(other, _Whole):
            return False
        (mine, spec), (theirs, other_spec) = map(
            pytree.tree_flatten, (self.output, other.output)
        )
        return spec == other_spec and all(map(operator.is_, mine, theirs))

    def __hash__(self) -> int:
        """Hash the identity of tensors."""
        return hash(tuple(map(id, pytree.tree_leaves(self.output))))


class BatchOutput:
    """A net's output for the whole batch, and the rows of it that are a microbatch's.

    As a pytree node its only leaf is `rows`: what takes or joins samples in a tree
    changes the rows, and leaves the output whole.

    Args:
        output: for the whole batch, over all replicas: the net's structure, whose
            tensors have samples along dimension 0.
        rows: the places of these samples among them, (samples,) of int64.
    """

    __slots__ = ("_whole", "rows")

    def __init__(self, output: Any, rows: Tensor) -> None:
        self._whole = output if isinstance(output, _Whole) else _Whole(output)
        self.rows = rows

    @property
    def all(self) -> Any:
        """The output for the whole batch."""
        return self._whole.output

    @property
    def own(self) -> Any:
        """The output for these samples."""
        return pytree.tree_map_only(Tensor, lambda leaf: leaf[self.rows], self.all)


pytree.register_pytree_node(
    BatchOutput,
    lambda output: ([output.rows], output._whole),
    lambda rows, whole: BatchOutput(whole, *rows),
)
