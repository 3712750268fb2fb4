"""Cuts a batch into microbatches that add up to it exactly.

A batch is a pair `(inputs, targets)`. The inputs are what the model is called with: a
tensor, a tuple of positional arguments, or a dict of keyword arguments. Tensors are cut
along their first dimension, a `PerSample` between its entries; everything else goes to
every microbatch as it is. Of a `PartBatch` a worker has only what it needs:
microbatches of other replicas are there by their size alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.errors import DataError, ShapeError
from hocket.model.trace.example import Example
from hocket.model.trace.per_sample import (
    PerSample,
    map_tensors,
    num_rows,
    split_rows,
    tensors_in,
)
from hocket.run.data.reads import PartBatch, even_sizes

_DIGEST_SAMPLES = 4096  # enough to distinguish tensors, cheap for large ones


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One part of the batch.

    Args:
        leaves: the model's arguments, flattened as `(args, kwargs)`.
        targets: the arguments of the loss beside the outputs.
        num_samples: the number of samples in this part.
        first_row: where they begin among the samples of their net, over all replicas.
        samples: (num_samples,) their rows in the data set, where the loader names them.
    """

    leaves: tuple[Any, ...]
    targets: Any
    num_samples: int
    first_row: int = 0
    samples: Tensor | None = None

    def on(self, device: torch.device) -> Microbatch:
        """Return the same microbatch on a device; see `on_device`."""
        leaves, targets = on_device((self.leaves, self.targets), device)
        return replace(self, leaves=leaves, targets=targets)


def call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments for a batch's inputs."""
    if isinstance(inputs, dict):
        return (), inputs
    if isinstance(inputs, tuple | list) and not isinstance(inputs, PerSample):
        return tuple(inputs), {}
    return (inputs,), {}


def on_device(values: Any, device: torch.device) -> Any:
    """Return a batch, or a part of one, with all its tensors on a device.

    The host does not wait for copies out of pinned memory.

    Raises:
        DataError: a tensor is on the meta device; names the leaf.
    """
    if isinstance(values, PartBatch):  # its loader has moved them
        return values
    if all(tensor.device == device for tensor in tensors_in(values)):
        return values
    for path, leaf in pytree.tree_flatten_with_path(values)[0]:
        if any(tensor.is_meta for tensor in tensors_in(leaf)):
            raise DataError(
                f"batch{pytree.keystr(path)} is on the meta device, which has shapes "
                f"and no values: give a tensor with values, on the CPU or on {device}"
            )
    move = partial(Tensor.to, device=device, non_blocking=True)
    return pytree.tree_map(partial(map_tensors, function=move), values)


def split_batch(
    batch: Any,
    num_parts: int,
    example: Example | None = None,
    sizes_of: Callable[[int], Sequence[int]] | None = None,
) -> tuple[Microbatch, ...]:
    """Cut a batch into `num_parts` microbatches, equal but for one sample.

    Args:
        batch: a pair `(inputs, targets)`, or a PartBatch.
        num_parts: the number of microbatches, over all replicas.
        example: the example that the model was captured with, if it is captured.
        sizes_of: returns the sizes of the microbatches of so many samples, where they
            are others (`hocket.run.data.nested_parts`).

    Raises:
        ShapeError: `num_parts` is below 1.
        DataError: the batch is no pair, has fewer samples than parts, or its tensors
            disagree about the number of samples.
        ModelError: the inputs differ from the example's in more than the samples.
    """
    sizes_of = (
        partial(even_sizes, num_parts=num_parts) if sizes_of is None else sizes_of
    )
    if isinstance(batch, PartBatch):
        _check_enough(batch.num_samples, num_parts)
        return _split_part(batch, sizes_of(batch.num_samples), example)
    inputs, targets = _pair(batch)
    arguments = _flat(inputs, example)
    num_samples = _num_samples([*arguments, *pytree.tree_leaves(targets)])
    _check_enough(num_samples, num_parts)
    return _cut(arguments, targets, sizes_of(num_samples))


def _split_part(
    batch: PartBatch, sizes: Sequence[int], example: Example | None
) -> tuple[Microbatch, ...]:
    """Do what `split_batch` does, with empty parts for other replicas."""
    begins = list(accumulate(sizes, initial=0))
    parts = [Microbatch((), None, size) for size in sizes]
    first, last = begins.index(batch.rows.start), begins.index(batch.rows.stop)
    if first == last:
        return tuple(parts)
    arguments = [] if batch.inputs is None else _flat(batch.inputs, example)
    num_here = batch.rows.stop - batch.rows.start
    for leaf in [*arguments, *pytree.tree_leaves(batch.targets)]:
        if num_rows(leaf) not in (None, num_here):
            raise DataError(
                f"the data set gave {num_rows(leaf)} samples where {num_here} rows "
                "were asked for: return one for each row, of inputs and of targets"
            )
    parts[first:last] = _cut(arguments, batch.targets, sizes[first:last])
    if batch.samples is None:
        return tuple(parts)
    named = batch.samples.rows.split(tuple(sizes))
    return tuple(
        replace(part, samples=own) for part, own in zip(parts, named, strict=True)
    )


def _flat(inputs: Any, example: Example | None) -> list[Any]:
    """Return the model's arguments as leaves, in the example's order if given."""
    args, kwargs = call_arguments(inputs)
    if example is None:
        return pytree.tree_leaves((args, kwargs))
    return example.flatten(args, kwargs)


def _check_enough(num_samples: int, num_parts: int) -> None:
    if num_parts < 1:
        raise ShapeError(f"num_microbatches={num_parts}: each must be at least 1")
    if num_samples < num_parts:
        raise DataError(
            f"a batch of {num_samples} samples cannot be cut into {num_parts} "
            "microbatches (over all replicas): use fewer microbatches, a larger batch, "
            "or drop_last=True in the loader if only the last batch is so small"
        )


def _cut(
    arguments: Sequence[Any], targets: Any, sizes: Sequence[int]
) -> tuple[Microbatch, ...]:
    leaves = _split_leaves(arguments, sizes)
    target_leaves, target_spec = pytree.tree_flatten(targets)
    target_parts = _split_leaves(target_leaves, sizes)
    return tuple(
        Microbatch(part, pytree.tree_unflatten(target, target_spec), size)
        for part, target, size in zip(leaves, target_parts, sizes, strict=True)
    )


def count_samples(batch: Any) -> int:
    """Return the number of samples of a batch, over all replicas.

    Raises:
        DataError: the batch is no pair, or its tensors disagree.
    """
    if isinstance(batch, PartBatch):
        return batch.num_samples
    return _num_samples(pytree.tree_leaves(_pair(batch)))


def digest(batch: Any) -> int:
    """Return 32 bits that differ between batches, so that workers detect it.

    Of each tensor on the CPU, some thousand elements count; on a GPU, where looking
    would wait for it, the shape alone.
    """
    if isinstance(batch, PartBatch):
        return batch.digest
    total = 0
    for leaf in tensors_in(batch):
        total = zlib.crc32(f"{leaf.dtype}{tuple(leaf.shape)}".encode(), total)
        if leaf.device.type == "cpu" and leaf.numel():
            flat = leaf.detach().reshape(-1)
            # An odd stride reads all columns of a table whose width is even.
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
    sizes = [rows for leaf in leaves if (rows := num_rows(leaf)) is not None]
    if not sizes:
        raise DataError("the batch holds no tensor with a batch dimension")
    if len(set(sizes)) > 1:
        raise DataError(
            "the tensors of a batch disagree about its number of samples (first "
            f"dimension): {', '.join(map(str, sizes))}"
        )
    return sizes[0]


def _split_leaves(leaves: Sequence[Any], sizes: Sequence[int]) -> list[tuple[Any, ...]]:
    columns = [
        [leaf] * len(sizes) if num_rows(leaf) is None else split_rows(leaf, sizes)
        for leaf in leaves
    ]
    if not columns:
        return [()] * len(sizes)
    return list(zip(*columns, strict=True))
