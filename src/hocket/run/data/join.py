"""Join the outputs or targets of microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.errors import ModelError
from hocket.model.trace.per_sample import PerSample


def joined(parts: Sequence[Any]) -> Any:
    """Join outputs or targets of several microbatches, in the order of samples.

    Args:
        parts: all of one structure, whose tensors have samples along dimension 0.

    Raises:
        ModelError: the structures differ, or a tensor has no dimension.
    """
    if len(parts) == 1:
        return parts[0]
    flat = [pytree.tree_flatten(part) for part in parts]
    _, spec = flat[0]
    columns = list(zip(*(leaves for leaves, _ in flat), strict=False))
    is_open = any(isinstance(x, Tensor) and x.dim() == 0 for c in columns for x in c)
    if is_open or any(other != spec for _, other in flat):
        raise ModelError(
            f"outputs or targets of {len(parts)} microbatches can only be joined if "
            "they have one structure, whose tensors have samples along dimension 0; "
            f"got {spec} with other parts or scalars"
        )
    return pytree.tree_unflatten(list(map(_joined_leaves, columns)), spec)


def _joined_leaves(leaves: tuple[Any, ...]) -> Any:
    if isinstance(leaves[0], PerSample):
        return PerSample(chain.from_iterable(leaves))
    if isinstance(leaves[0], np.ndarray):
        return np.concatenate(leaves)
    return torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0]
