"""Cuts a batch into microbatches that add up to it exactly, and joins outputs again.

A batch is a pair `(inputs, targets)`. The inputs are what the model is called with: a
tensor, a tuple of positional arguments, or a dict of keyword arguments. Tensors and
NumPy arrays are cut along their first dimension, a `PerSample` between its entries;
what is `Shared`, numbers and None go to every microbatch as they are. What may be
either is refused (`cut_checks.py`). Of a `PartBatch` a worker has only what it needs:
microbatches of other replicas are there by their size alone.

A `BatchOutput` is what another net returns for the whole batch: cut and joined, its
rows are those of the microbatch.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.errors import DataError, ModelError, ShapeError
from hocket.model.trace.example import PLAIN, Example
from hocket.model.trace.local import local
from hocket.model.trace.per_sample import (
    PerSample,
    Shared,
    map_tensors,
    num_rows,
    opened,
    split_rows,
    tensors_in,
    unshared,
)
from hocket.model.trace.state import home_of
from hocket.run.data.cut_checks import refuse_shared, refuse_unclear, rows_fault
from hocket.run.data.reads import PartBatch, even_sizes

_DIGEST_SAMPLES = 4096  # enough to distinguish tensors, cheap for large ones


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One part of the batch.

    Args:
        leaves: the model's arguments, flattened as `(args, kwargs)`.
        targets: the arguments of the loss beside the outputs. Of what is `Shared`, the
            loss gets the value.
        num_samples: the number of samples in this part.
        first_row: where they begin among the samples of their net, over all replicas.
        samples: (num_samples,) their rows in the data set, where the loader names them.
        shared: the leaves that are the whole batch's.
    """

    leaves: tuple[Any, ...]
    targets: Any
    num_samples: int
    first_row: int = 0
    samples: Tensor | None = None
    shared: frozenset[int] = frozenset()

    @property
    def marked(self) -> list[Any]:
        """The leaves, of which those that are `Shared` say so: to capture a model."""
        marks = (i in self.shared for i in range(len(self.leaves)))
        pairs = zip(self.leaves, marks, strict=True)
        return [Shared(leaf) if is_shared else leaf for leaf, is_shared in pairs]

    def on(self, device: torch.device) -> Microbatch:
        """Return the same microbatch on a device; see `on_device`."""
        leaves, targets = on_device((self.leaves, self.targets), device)
        return replace(self, leaves=leaves, targets=targets)


def apart(batch: Any) -> Any:
    """Return a batch of which no gradient and no change reaches the user's tensors.

    Targets are copied, for losses may change them in place. Models may not.
    """
    if isinstance(batch, Mapping):  # by net
        return {net: apart(pair) for net, pair in batch.items()}
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        return batch  # which is refused

    def detached(x: Tensor) -> Tensor:
        return x.detach().requires_grad_(x.requires_grad)

    def copied(x: Tensor) -> Tensor:
        return x.detach().clone().requires_grad_(x.requires_grad)

    inputs, targets = batch
    return _mapped(inputs, detached), _mapped(targets, copied)


def kept(batch: Any) -> Any:
    """Return a batch that stays as it is while its loader makes the next one.

    Some loaders fill the same memory again. Tensors that want a gradient are the
    user's own, for that is where it goes.
    """
    if isinstance(batch, PartBatch):
        return batch

    return _mapped(batch, lambda x: x if x.requires_grad else x.clone())


def _mapped(values: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return values with a function applied to each tensor; arrays are copied."""

    def leaf_of(leaf: Any) -> Any:
        is_array = isinstance(leaf, np.ndarray)
        return leaf.copy() if is_array else map_tensors(leaf, function)

    return pytree.tree_map(leaf_of, opened(values))


def call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments for a batch's inputs."""
    inputs = opened(inputs)
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
    values = opened(values)
    tensors = tensors_in(values)
    if all(tensor.device == device for tensor in tensors):
        return values
    if any(tensor.is_meta for tensor in tensors):
        named = pytree.tree_flatten_with_path(values)[0]
        path = next(p for p, leaf in named if any(x.is_meta for x in tensors_in(leaf)))
        raise DataError(
            f"batch{pytree.keystr(path)} is on the meta device, which has shapes "
            f"and no values: give a tensor with values, on the CPU or on {device}"
        )
    # The host reads its own tensors at once: it waits for copies there.
    move = partial(Tensor.to, device=device, non_blocking=device.type != "cpu")
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
            are others (`hocket.run.engine.programs.part_sizes`).

    Raises:
        ShapeError: `num_parts` is below 1.
        DataError: the batch is no pair, has fewer samples than parts, its tensors
            disagree about the number of samples, or it is not clear how to cut it.
        ModelError: the inputs differ from the example's in more than the samples.
    """
    sizes_of = (
        partial(even_sizes, num_parts=num_parts) if sizes_of is None else sizes_of
    )
    if isinstance(batch, PartBatch):
        _check_enough(batch.num_samples, num_parts)
        return _split_part(batch, sizes_of(batch.num_samples), example)
    inputs, targets = opened(_pair(batch))
    arguments = _flat(inputs, example)
    num_samples = _num_samples(inputs, targets, cuts=num_parts > 1)
    _check_enough(num_samples, num_parts)
    return _cut(arguments, targets, sizes_of(num_samples))


def form_of(batch: Any) -> Example | None:
    """Return the form of a batch's inputs, without values; None if none has samples."""
    args, kwargs = call_arguments(_pair(batch)[0])
    if all(num_rows(leaf) is None for leaf in pytree.tree_leaves((args, kwargs))):
        return None
    return Example.of(args, kwargs).mapped(lambda x: x.detach().to("meta"))


def to_capture(
    model: nn.Module,
    batch: Any,
    num_parts: int,
    sizes_of: Callable[[int], Sequence[int]] | None = None,
    others: Sequence[Any] = (),
) -> tuple[Microbatch, tuple[Any, ...], dict[str, Any]]:
    """Cut an example, and return the arguments to capture a model with, where it is.

    Args:
        model: the model.
        batch: a pair `(inputs, targets)`.
        num_parts: as for `split_batch`.
        sizes_of: as for `split_batch`.
        others: other nets' outputs, which the model gets as its first arguments.

    Returns:
        The first microbatch, and the arguments of the model for it.

    Raises:
        DataError: see `split_batch`; or all samples share an argument that would be
            cut.
    """
    if (home := home_of(model)) is not None:
        batch, others = on_device((batch, others), home)
    part, *_ = split_batch(batch, num_parts, sizes_of=sizes_of)
    args, kwargs = call_arguments(batch[0])
    if num_parts > 1 and not others:
        refuse_shared(model, args, kwargs)
    spec = pytree.tree_structure(((*others, *args), kwargs))
    args, kwargs = pytree.tree_unflatten([*others, *part.marked], spec)
    return part, args, kwargs


def _split_part(
    batch: PartBatch, sizes: Sequence[int], example: Example | None
) -> tuple[Microbatch, ...]:
    """Do what `split_batch` does, with empty parts for other replicas."""
    begins = list(accumulate(sizes, initial=0))
    parts = [Microbatch((), None, size) for size in sizes]
    first, last = begins.index(batch.rows.start), begins.index(batch.rows.stop)
    if first == last:
        return tuple(parts)
    inputs, targets = opened((batch.inputs, batch.targets))
    num_here = batch.rows.stop - batch.rows.start
    args, kwargs = call_arguments(() if inputs is None else inputs)
    refuse_unclear(args, kwargs, targets, cuts=last > first + 1)
    if example is not None:  # other workers read other rows
        example = replace(example, any_form=False)
    arguments = [] if inputs is None else _flat(inputs, example)
    for leaf in [*arguments, *pytree.tree_leaves(targets)]:
        if num_rows(leaf) not in (None, num_here):
            raise DataError(
                f"the data set gave {num_rows(leaf)} samples where {num_here} rows "
                "were asked for: return one for each row, of inputs and of targets"
            )
    parts[first:last] = _cut(arguments, targets, sizes[first:last])
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
    found = (i for i, leaf in enumerate(arguments) if isinstance(leaf, Shared))
    made = partial(Microbatch, shared=frozenset(found))
    return tuple(
        made(unshared(part), pytree.tree_unflatten(target, target_spec), size)
        for part, target, size in zip(leaves, target_parts, sizes, strict=True)
    )


def count_samples(batch: Any) -> int:
    """Return the number of samples of a batch, over all replicas.

    Raises:
        DataError: the batch is no pair, or its tensors disagree.
    """
    if isinstance(batch, PartBatch):
        return batch.num_samples
    return _num_samples(*opened(_pair(batch)))


def whole(batch: Any) -> Any:
    """Return a batch as models and losses are given it where none is cut."""
    return unshared(opened(batch))


def digest(batch: Any) -> int:
    """Return 32 bits that differ between batches, so that workers detect it.

    Of each tensor on the CPU, some thousand elements count; on a GPU, where looking
    would wait for it, the shape alone. Numbers and texts count whole.
    """
    if isinstance(batch, PartBatch):
        return batch.digest
    leaves = pytree.tree_leaves(opened(batch))
    plain = [x for x in leaves if isinstance(x, PLAIN)]
    total = zlib.crc32(repr(plain).encode()) if plain else 0
    arrays = (x for x in leaves if isinstance(x, np.ndarray))
    numbers = [torch.tensor(x) for x in arrays if x.dtype.kind in "biufc"]
    for leaf in tensors_in([*leaves, *numbers]):
        total = zlib.crc32(f"{leaf.dtype}{tuple(leaf.shape)}".encode(), total)
        if leaf.device.type == "cpu" and leaf.numel():
            flat = local(leaf).detach().reshape(-1)
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
    if isinstance(batch, Mapping):
        return f"a dict with keys {', '.join(map(str, batch))}"
    return f"a {type(batch).__name__}"


def _num_samples(inputs: Any, targets: Any, *, cuts: bool = False) -> int:
    """Return the number of samples.

    Args:
        inputs: the batch's.
        targets: the batch's.
        cuts: whether it is cut, so that it must be clear what belongs to a sample.
    """
    args, kwargs = call_arguments(inputs)
    refuse_unclear(args, kwargs, targets, cuts=cuts)
    leaves = pytree.tree_leaves((args, kwargs, targets))
    sizes = {rows for leaf in leaves if (rows := num_rows(leaf)) is not None}
    if len(sizes) != 1:
        raise DataError(rows_fault(args, kwargs, targets))
    return sizes.pop()


def _split_leaves(leaves: Sequence[Any], sizes: Sequence[int]) -> list[tuple[Any, ...]]:
    columns = [
        [leaf] * len(sizes) if num_rows(leaf) is None else split_rows(leaf, sizes)
        for leaf in leaves
    ]
    if not columns:
        return [()] * len(sizes)
    return list(zip(*columns, strict=True))


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
