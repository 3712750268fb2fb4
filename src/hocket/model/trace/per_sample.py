"""Arguments that are no tensor with the samples along its first dimension.

    images = PerSample([image_3HW, image_3HW, ...])     of different sizes
    boxes = PerSample([{"boxes": boxes_N4}, ...])       of different numbers
    mask = Shared(mask_TT)                              every sample's, not cut

The model gets a list, and the mask itself. "The samples of an argument" has one
meaning, which lives here: a NumPy array is cut as a tensor is, a `PerSample` between
its entries, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class PerSample(list[Any]):
    """A list with one entry per sample.

    Flattening a batch makes it one leaf: a plain list would be as many leaves as it has
    entries, and its samples would look like arguments.
    """


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """A value that all samples of a batch share: each microbatch gets the whole of it.

    The model and the loss get the value itself. An argument that is shared in the
    example is shared in every batch, with other values and the same shapes.

    Args:
        value: a tensor, such as a mask or positions; or anything made of tensors,
            arrays and numbers.
    """

    value: Any


DATA: Final = (Tensor, PerSample, np.ndarray)  # leaves that differ between batches


def num_rows(leaf: object) -> int | None:
    """Return how many samples a leaf of a batch holds; None if it is not cut."""
    if isinstance(leaf, PerSample):
        return len(leaf)
    if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim:
        return leaf.shape[0]
    return None


def take_rows(leaf: Any, rows: Tensor) -> Any:
    """Return a leaf with selected samples.

    Args:
        leaf: a tensor, an array or a PerSample.
        rows: the numbers of the samples, 1-dimensional; repetitions are allowed.
    """
    if isinstance(leaf, PerSample):
        return PerSample(leaf[row] for row in rows.tolist())
    if isinstance(leaf, np.ndarray):
        return leaf[rows.numpy(force=True)]
    return leaf[rows.to(leaf.device)]


def split_rows(leaf: Any, sizes: Sequence[int]) -> list[Any]:
    """Split a leaf into parts of so many samples."""
    if isinstance(leaf, Tensor):
        return list(leaf.split(tuple(sizes)))
    rows = torch.arange(len(leaf)).split(tuple(sizes))
    return [take_rows(leaf, part) for part in rows]


def opened(values: Any) -> Any:
    """Return a batch, or a part of one, whose mappings are dicts.

    What is shared becomes a structure of shared leaves. So a leaf holds no others,
    except for those of a PerSample.
    """

    def open_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):
            return opened(dict(leaf))
        if isinstance(leaf, Shared):
            return pytree.tree_map(Shared, opened(unshared(leaf.value)))
        return leaf

    leaves, spec = pytree.tree_flatten(values)
    if not any(isinstance(leaf, Shared | Mapping) for leaf in leaves):
        return values
    return pytree.tree_unflatten(map(open_leaf, leaves), spec)


def unshared(values: Any) -> Any:
    """Return a structure with the values of what is shared: what models are given."""
    if isinstance(values, Tensor):
        return values
    return pytree.tree_map_only(Shared, lambda leaf: leaf.value, values)


def tensors_in(leaf: object) -> list[Tensor]:
    """Return the tensors of a leaf, or of anything nested."""
    if isinstance(leaf, Tensor):
        return [leaf]
    if isinstance(leaf, tuple) and all(isinstance(x, Tensor) for x in leaf):
        return [*leaf]
    if isinstance(leaf, PerSample):
        leaf = list(leaf)
    leaves = pytree.tree_leaves(leaf)
    found = []
    for one in leaves:
        if isinstance(one, PerSample):
            found += tensors_in(one)
        elif isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, Shared):
            found += tensors_in(one.value)
    return found


def map_tensors(leaf: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a leaf with a function applied to each of its tensors."""
    if isinstance(leaf, PerSample):
        return PerSample(pytree.tree_map_only(Tensor, function, list(leaf)))
    if isinstance(leaf, Shared):
        return Shared(map_tensors(leaf.value, function))
    return function(leaf) if isinstance(leaf, Tensor) else leaf
