"""Cut a batch into microbatches that add up to it exactly.

A batch is a pair `(inputs, targets)`. The inputs are what the model is called with: a
tensor, a tuple of positional arguments, or a dict of keyword arguments. Tensors whose
first dimension is the batch are cut along it; everything else goes to every microbatch
as it is.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.errors import DataError
from hocket.model.example import Example

_DIGEST_SAMPLES = 4096  # enough to tell tensors apart, cheap for large ones


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One part of the batch.

    Args:
        leaves: the model's arguments, flattened as `(args, kwargs)`.
        targets: as the loss takes them.
        num_samples: rows of the batch in this part.
    """

    leaves: tuple[Any, ...]
    targets: Any
    num_samples: int


def call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments that a batch's inputs stand for."""
    if isinstance(inputs, dict):
        return (), inputs
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return (inputs,), {}


def split_batch(
    batch: Any, num_parts: int, example: Example | None = None
) -> tuple[Microbatch, ...]:
    """Cut a batch into `num_parts` microbatches, equal but for one sample.

    Args:
        batch: a pair `(inputs, targets)`.
        num_parts: microbatches.
        example: what the model was captured with, once it is.

    Raises:
        DataError: the batch is no pair, has fewer samples than parts, or its tensors
            disagree about the number of samples.
        ModelError: the inputs differ from the example's in more than the samples.
    """
    inputs, targets = _pair(batch)
    args, kwargs = call_arguments(inputs)
    arguments = (
        pytree.tree_leaves((args, kwargs))
        if example is None
        else example.flatten(args, kwargs)
    )
    num_samples = _num_samples([*arguments, *pytree.tree_leaves(targets)])
    if num_samples < num_parts:
        raise DataError(
            f"a batch of {num_samples} samples cannot be cut into {num_parts} "
            "microbatches (over all replicas): use fewer microbatches, a larger batch, "
            "or drop_last=True in the loader if only the last batch is so small"
        )
    leaves = _split_leaves(arguments, num_samples, num_parts)
    target_leaves, target_spec = pytree.tree_flatten(targets)
    target_parts = _split_leaves(target_leaves, num_samples, num_parts)
    sizes = [len(rows) for rows in torch.arange(num_samples).tensor_split(num_parts)]
    return tuple(
        Microbatch(part, pytree.tree_unflatten(target, target_spec), size)
        for part, target, size in zip(leaves, target_parts, sizes, strict=True)
    )


def count_samples(batch: Any) -> int:
    """The number of samples of a batch `(inputs, targets)`.

    Raises:
        DataError: the batch is no pair, or its tensors disagree.
    """
    return _num_samples(pytree.tree_leaves(_pair(batch)))


def digest(batch: Any) -> int:
    """32 bits that tell batches apart, for workers to notice that theirs differ.

    Of each tensor on the CPU, some thousand elements count; on a GPU, where looking
    would wait for it, the shape alone.
    """
    total = 0
    for leaf in pytree.tree_leaves(batch):
        if not isinstance(leaf, Tensor):
            continue
        total = zlib.crc32(f"{leaf.dtype}{tuple(leaf.shape)}".encode(), total)
        if leaf.device.type == "cpu" and leaf.numel():
            flat = leaf.detach().reshape(-1)
            # An odd stride comes by all columns of a table whose width is even.
            stride = max(1, flat.numel() // _DIGEST_SAMPLES) | 1
            sample = flat[::stride].contiguous().resolve_conj().view(torch.uint8)
            total = zlib.crc32(sample.numpy().data, total)
    return total


def _pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise DataError(
        "a batch must be a pair (inputs, targets), where inputs is a tensor, a tuple "
        f"of positional or a dict of keyword arguments; got {_describe(batch)}"
    )


def _describe(batch: Any) -> str:
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {len(batch)}"
    if isinstance(batch, dict):
        return f"a dict with keys {', '.join(map(str, batch))}"
    return f"a {type(batch).__name__}"


def _num_samples(leaves: Sequence[Any]) -> int:
    sizes = [
        leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()
    ]
    if not sizes:
        raise DataError("the batch holds no tensor with a batch dimension")
    if len(set(sizes)) > 1:
        raise DataError(
            "the tensors of a batch disagree about its number of samples (first "
            f"dimension): {', '.join(map(str, sizes))}"
        )
    return int(sizes[0])


def _split_leaves(
    leaves: Sequence[Any], num_samples: int, num_parts: int
) -> list[tuple[Any, ...]]:
    columns = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.dim():
            columns.append(leaf.tensor_split(num_parts))
        else:
            columns.append((leaf,) * num_parts)
    if not columns:
        return [()] * num_parts
    return list(zip(*columns, strict=True))
