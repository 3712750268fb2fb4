"""Computes a loss by microbatches, and the same loss over the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Loss = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of one teacher, as a loss reads them."""

    all: Any
    rows: Tensor

    @classmethod
    def at(cls, every: Any, rows: slice) -> Outputs:
        """Outputs of which consecutive rows are the microbatch's."""
        num_rows = len(pytree.tree_leaves(every)[0])
        return cls(every, torch.arange(*rows.indices(num_rows)))

    @property
    def own(self) -> Any:
        """The rows of the microbatch."""
        return rows_of(self.all, self.rows)


def rows_of(structure: Any, rows: slice | Tensor) -> Any:
    """The rows of every tensor."""
    return pytree.tree_map_only(Tensor, lambda x: x[rows], structure)


def total(value: Tensor | Mapping[str, Tensor]) -> Tensor:
    """What is trained."""
    return value if isinstance(value, Tensor) else value["loss"]


def joint(
    loss: Loss,
    output: Any,
    targets: Any,
    teacher: Any,
    sizes: Sequence[int],
    *,
    count: Callable[[Any], Tensor | float] | None = None,
    reverse: bool = False,
) -> Tensor:
    """The mean of a loss over microbatches, by samples or by what `count` returns.

    Args:
        loss: the loss function.
        output: the student's outputs of the whole batch.
        targets: its targets.
        teacher: the outputs of the only teacher, named "teacher".
        sizes: the samples of each microbatch.
        count: a microbatch's weight, of its targets.
        reverse: whether the last microbatch comes first.
    """
    ends = torch.tensor(sizes).cumsum(0).tolist()
    slices = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    assert ends[-1] == len(pytree.tree_leaves(output)[0])
    losses, weights = [], []
    for rows in reversed(slices) if reverse else slices:
        own = rows_of((output, targets), rows)
        weight = rows.stop - rows.start if count is None else float(count(own[1]))
        if weight:
            value = loss(*own, {"teacher": Outputs.at(teacher, rows)})
            losses.append(weight * total(value))
            weights.append(weight)
    return torch.stack(losses).sum() / sum(weights)


def assert_equal_with_gradients(
    found: Tensor, expected: Tensor, leaves: Sequence[Tensor]
) -> None:
    """Two losses are equal, and their gradients in the student's outputs, to 1e-12."""
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for leaf in leaves:
        grads = [
            torch.autograd.grad(x, leaf, retain_graph=True)[0]
            for x in (found, expected)
        ]
        torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
