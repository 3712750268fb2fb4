"""Arguments with one entry per sample, which cannot be stacked into one tensor.

    images = PerSample([image_3HW, image_3HW, ...])     of different sizes
    boxes = PerSample([{"boxes": boxes_N4}, ...])       of different numbers

The model gets a list. A batch is cut along it as along the first dimension of a tensor,
so that "the samples of an argument" has one meaning; that meaning lives here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class PerSample(list[Any]):
    """A list with one entry per sample.

    Flattening a batch makes it one leaf: a plain list would be as many leaves as it has
    entries, and its samples would look like arguments.
    """


def num_rows(leaf: object) -> int | None:
    """Return how many samples a leaf of a batch holds; None if it is not cut."""
    if isinstance(leaf, PerSample):
        return len(leaf)
    return leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else None


def take_rows(leaf: Any, rows: Tensor) -> Any:
    """Return a leaf with selected samples.

    Args:
        leaf: a tensor or a PerSample.
        rows: the numbers of the samples, 1-dimensional; repetitions are allowed.
    """
    if isinstance(leaf, PerSample):
        return PerSample(leaf[row] for row in rows.tolist())
    return leaf[rows.to(leaf.device)]


def split_rows(leaf: Any, sizes: Sequence[int]) -> list[Any]:
    """Split a leaf into parts of so many samples."""
    if not isinstance(leaf, PerSample):
        return list(leaf.split(tuple(sizes)))
    rows = torch.arange(len(leaf)).split(tuple(sizes))
    return [take_rows(leaf, part) for part in rows]


def tensors_in(leaf: object) -> list[Tensor]:
    """Yield the tensors of a leaf, or of anything nested."""
    if isinstance(leaf, PerSample):
        leaf = list(leaf)
    leaves = pytree.tree_leaves(leaf)
    found = []
    for one in leaves:
        if isinstance(one, PerSample):
            found += tensors_in(one)
        elif isinstance(one, Tensor):
            found.append(one)
    return found


def map_tensors(leaf: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a leaf with a function applied to each of its tensors."""
    if isinstance(leaf, PerSample):
        return PerSample(pytree.tree_map_only(Tensor, function, list(leaf)))
    return function(leaf) if isinstance(leaf, Tensor) else leaf
