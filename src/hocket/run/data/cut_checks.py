"""Refuses batches of which it is not clear what belongs to one sample.

    a list with as many entries as there are samples     its entries, or one argument?
    a list of another length, numbers, None              every microbatch gets all of it
    (labels_N, boxes_N4)                                 a structure: its leaves are cut
    a tensor, array or PerSample                         cut
    what is sparse or nested                             has no rows to cut

A tensor whose first dimension has the samples' number by chance, such as a mask over as
many positions, is found by running the model on two samples:

    the mask cut, too       fails, or gives other outputs than the whole batch
    with the whole mask     gives the whole batch's outputs for these samples: refused

What cannot be seen so: a mask of equal rows, which gives the same outputs either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from functools import partial
from itertools import chain, combinations
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.errors import DataError
from hocket.model.capture.attribute_writes import preserve_attributes
from hocket.model.trace.are_close import are_close
from hocket.model.trace.example import Example, argument_name
from hocket.model.trace.observe import in_mode, preserve_state
from hocket.model.trace.per_sample import DATA, Shared, num_rows, tensors_in, unshared
from hocket.model.trace.state import State

_NUMBERS: Final = (bool, int, float, complex, str, bytes, type(None), np.generic)
_PLAIN: Final = (*DATA, *_NUMBERS, Shared, torch.Size)
_WAYS_OUT: Final = (
    "give one entry per sample as hocket.PerSample(values), and what all samples share "
    "(a mask, positions, class weights) as hocket.Shared(value), in every batch"
)
_MOST_NAMED: Final = 6
_MOST_TRIED: Final = 4  # arguments of which every choice is tried


def refuse_unclear(
    args: Sequence[Any], kwargs: Mapping[str, Any], targets: Any, *, cuts: bool
) -> None:
    """Refuse a batch that cannot be cut, or may be cut in two ways.

    Args:
        args: the positional arguments; open.
        kwargs: the keyword arguments; open.
        targets: the targets; open.
        cuts: whether it is cut at all.

    Raises:
        DataError: names the argument, and the ways out.
    """
    positional = {f"args[{i}]": value for i, value in enumerate(args)}
    values = [*positional.items(), *kwargs.items(), ("targets", targets)]
    if all(isinstance(x, Tensor) and _is_dense(x) and not x.grad_fn for _, x in values):
        return
    leaves = pytree.tree_leaves((args, kwargs, targets))
    rows = [found for leaf in leaves if (found := num_rows(leaf)) is not None]
    for name, value in values:
        for what in _unclear(value, name, rows[0] if cuts and rows else 0):
            raise DataError(f"{what}: {_WAYS_OUT}")


def refuse_shared(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Refuse arguments that all samples share, and that would be cut.

    The model runs only if there are several tensors, and the number of samples is also
    another dimension of an argument or of a weight.

    Args:
        model: the model, which stays as it is.
        args: the positional arguments, of a whole batch, where the model is.
        kwargs: the keyword arguments.

    Raises:
        DataError: names them, and the way out.
    """
    example, state = Example.of(tuple(args), kwargs), State.of(model)
    leaves = example.leaves
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    cut = [i for i in tensors if example.batched[i]]
    lengths = {n for i in cut for n in leaves[i].shape[1:]}
    lengths |= {n for tensor in state.tensors.values() for n in tensor.shape}
    everything = [*state.tensors.values(), *tensors_in(leaves)]
    may_be = len(cut) > 1 and example.num_samples in lengths - {1}
    if not may_be or any(tensor.is_meta for tensor in everything):
        return
    example = example.mapped(Tensor.detach)
    with (
        in_mode(model, training=False),
        preserve_state(state),
        preserve_attributes(model),
        torch.no_grad(),
    ):
        found = _found_shared(partial(_outputs, model), example, cut)
    if found:
        names = " and ".join(example.names[i] for i in found)
        raise DataError(
            f"the first dimension of {names} is the batch's number of samples, "
            f"{example.num_samples}, but cut with them the model computes something "
            f"else, so that all samples share it: {_WAYS_OUT}"
        )


def _found_shared(
    run: Callable[[Example], list[Tensor] | None], example: Example, cut: Sequence[int]
) -> tuple[int, ...]:
    """Return the arguments that the model needs whole; none if all can be cut."""
    few = example.resized(1 if example.num_samples == 2 else 2)
    alone = run(few)
    most = len(cut) if len(cut) <= _MOST_TRIED else 2
    for chosen in chain.from_iterable(combinations(cut, n) for n in range(1, most)):
        both = enumerate(zip(example.leaves, few.leaves, strict=True))
        leaves = tuple(whole if i in chosen else leaf for i, (whole, leaf) in both)
        shared = run(replace(few, leaves=leaves))
        if not shared or any(num_rows(x) != few.num_samples for x in shared):
            continue
        if alone is not None and are_close(alone, shared):
            continue
        every = run(example) or []
        if are_close(shared, [x[: few.num_samples] for x in every if x.dim()]):
            return chosen
    return ()


def _outputs(model: nn.Module, example: Example) -> list[Tensor] | None:
    args, kwargs = example.call()
    try:
        return tensors_in(model(*args, **kwargs))
    except Exception:
        return None


def rows_fault(args: Sequence[Any], kwargs: Mapping[str, Any], targets: Any) -> str:
    """Describe arguments that disagree about the number of samples."""
    paths, _ = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
    named = [(argument_name(path), leaf) for path, leaf in paths]
    paths, _ = pytree.tree_flatten_with_path(targets)
    named += [(f"targets{pytree.keystr(path)}", leaf) for path, leaf in paths]
    rows = [(name, num_rows(leaf)) for name, leaf in named]
    found = [f"{name} has {count}" for name, count in rows if count is not None]
    if not found:
        return "the batch holds no tensor with a batch dimension"
    more = ", ..." if len(found) > _MOST_NAMED else ""
    return (
        "the tensors of a batch disagree about its number of samples (first "
        f"dimension): {', '.join(found[:_MOST_NAMED])}{more}; {_WAYS_OUT}"
    )


def _unclear(value: Any, name: str, num_samples: int) -> Iterator[str]:
    """Yield what is not clear about a value, and about the values in it."""
    tensor = unshared(value)
    if isinstance(tensor, Tensor) and not _is_dense(tensor):
        kind = "nested" if tensor.is_nested else f"{tensor.layout}".rpartition(".")[2]
        raise DataError(
            f"{name} is a {kind} tensor: give x.to_dense(), or its "
            "samples as hocket.PerSample(x.unbind())"
        )
    if isinstance(tensor, Tensor) and tensor.grad_fn is not None and num_samples:
        raise DataError(
            f"{name} comes out of a graph ({tensor.grad_fn.name()}), which runs "
            "backward once, and each microbatch has a backward of its own: let the "
            "model compute it, or detach it; or take num_microbatches=1"
        )
    if isinstance(value, _PLAIN):
        return
    inner, _ = pytree.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
    is_leaf = len(inner) == 1 and inner[0][1] is value
    kind = type(value).__name__
    if isinstance(value, list | tuple) or is_leaf:
        length = len(value) if isinstance(value, Sized) else None
        if length == num_samples and not _is_structure(value, num_samples):
            yield (
                f"{name} is a {kind} of {length} entries, as many as the batch has "
                "samples, so that it may be one for each sample, or the same for all"
            )
    if is_leaf and num_samples and tensors_in([*_attributes(value)]):
        yield f"{name} is a {kind}, which holds tensors, and it is not known how to cut"
    for path, child in inner if not is_leaf else ():
        yield from _unclear(child, f"{name}{pytree.keystr(path)}", num_samples)


def _is_structure(value: Any, num_samples: int) -> bool:
    """Return whether a list holds arguments that are cut themselves.

    One whose entries all have one form may as well hold one sample in each.
    """
    entries = list(value)
    rows = map(num_rows, pytree.tree_leaves(entries))
    has_shared = any(isinstance(x, Shared) for x in pytree.tree_leaves(entries))
    return has_shared or (num_samples in rows and len(set(map(_form_of, entries))) > 1)


def _form_of(entry: Any) -> str:
    return str(
        pytree.tree_map(
            lambda x: f"{type(x)} {getattr(x, 'shape', '')} {getattr(x, 'dtype', '')}",
            entry,
        )
    )


def _attributes(value: Any) -> Iterator[Any]:
    """Yield what an object of a class that is not known holds."""
    yield from getattr(value, "__dict__", {}).values()
    for name in chain.from_iterable(
        getattr(kind, "__slots__", ()) for kind in type(value).__mro__
    ):
        yield getattr(value, name, None)
    yield from value if isinstance(value, Iterable) else ()


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested
