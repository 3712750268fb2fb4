"""The example microbatch: the model's arguments, flattened into leaves.

Numbers of a batch's tensors always refer to this order: the leaves of the pytree
`(args, kwargs)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.errors import ModelError
from hocket.model.trace.per_sample import (
    PerSample,
    Shared,
    map_tensors,
    num_rows,
    opened,
    take_rows,
    unshared,
)

_ARRAYS = (Tensor, np.ndarray)

# The shape of each leaf behind its samples; of what is `Shared`, the whole shape.
Lengths: TypeAlias = tuple[tuple[int, ...], ...]

Place: TypeAlias = tuple[int, int]  # a leaf, and a dimension of it

PLAIN: Final = (bool, int, float, str, type(None))


class Form(NamedTuple):
    """What may differ from batch to batch besides samples.

    Args:
        lengths: see `Lengths`.
        values: the type, text and value of each leaf that is a number, a text or None;
            of others, nothing. The text of -0.0 is another one than that of 0.0.
    """

    lengths: Lengths = ()
    values: tuple[tuple[Any, ...], ...] = ()


NO_FORM: Final = Form()  # all is as in the example


@dataclass(frozen=True, slots=True)
class Example:
    """One microbatch, flattened.

    Args:
        leaves: tensors and the arguments' other leaves, in pytree order.
        spec: puts the leaves back into `(args, kwargs)`.
        names: the leaves' names, as one would write them: `args[0]`, `attention_mask`.
        num_samples: the samples of the first leaf that has any.
        batched: for each leaf, whether its first dimension (or its list) is the
            samples; not for what is `Shared`.
        open: the dimensions that may be of any size, each with a size that a model is
            exported with.
        any_form: whether batches may have other forms, which nets then follow.
    """

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    names: tuple[str, ...]
    num_samples: int
    batched: tuple[bool, ...]
    open: Mapping[Place, int] = field(default_factory=dict)
    any_form: bool = False

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Example:
        """Flatten the arguments of a call.

        Raises:
            ModelError: no argument is a tensor with a batch dimension.
        """
        given = opened((tuple(args), dict(kwargs)))
        paths, spec = pytree.tree_flatten_with_path(given)
        leaves = tuple(leaf for _, leaf in paths)
        sizes = [rows for leaf in leaves if (rows := num_rows(leaf)) is not None]
        if not sizes:
            kinds = ", ".join(type(leaf).__name__ for leaf in leaves) or "nothing"
            raise ModelError(
                "an example microbatch must hold a tensor whose first dimension is the "
                f"samples, or a PerSample; got {kinds}"
            )
        return cls(
            unshared(leaves),
            spec,
            tuple(argument_name(path) for path, _ in paths),
            sizes[0],
            tuple(num_rows(leaf) == sizes[0] for leaf in leaves),
        )

    def call(self, *, marked: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments again, as `(args, kwargs)`.

        Args:
            marked: whether what is `Shared` says so.
        """
        leaves = [
            Shared(leaf) if marked and not cut and num_rows(leaf) is not None else leaf
            for leaf, cut in zip(self.leaves, self.batched, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def resized(self, num_samples: int) -> Example:
        """Return an example with another number of samples; rows repeat if needed."""
        rows = torch.arange(num_samples) % self.num_samples
        leaves = tuple(
            take_rows(map_tensors(leaf, Tensor.detach), rows) if batched else leaf
            for leaf, batched in zip(self.leaves, self.batched, strict=True)
        )
        return replace(self, leaves=leaves, num_samples=num_samples)

    def stretched(self) -> Example:
        """Return an example with the sizes of `open`; values repeat if needed."""
        leaves = [*self.leaves]
        for (i, dim), size in self.open.items():
            leaf, places = leaves[i], torch.arange(size) % leaves[i].shape[dim]
            if isinstance(leaf, np.ndarray):
                leaves[i] = leaf.take(places.numpy(), dim)
            else:
                leaves[i] = leaf.index_select(dim, places.to(leaf.device))
        return replace(self, leaves=tuple(leaves))

    def at(self, lengths: Lengths) -> Example:
        """Return an example of other lengths; values repeat if needed."""
        return replace(replace(self, open=self.sizes(lengths)).stretched(), open={})

    def with_values(self, form: Form, *, as_tensors: bool = False) -> Example:
        """Return an example with the numbers and texts of a form.

        Args:
            form: a batch's.
            as_tensors: whether floats that differ, or that have been tensors of no
                dimensions, are such tensors.
        """
        leaves = [*self.leaves]
        for i, new in ((i, x) for i, x in enumerate(form.values) if x):
            is_open = is_number(leaves[i]) or bool(self._fault_of_value(i, new))
            leaves[i] = new[-1]
            # No class of another library.
            if as_tensors and is_open and type(new[-1]) is float:
                leaves[i] = torch.tensor(new[-1], dtype=torch.float64)
        return replace(self, leaves=tuple(leaves))

    def form_of(self, leaves: Sequence[Any]) -> Form:
        """Return the form of a batch; of what is as in this example, nothing."""
        pairs = zip(self._form(leaves), self.form, strict=True)
        lengths, values = (x if x != own else () for x, own in pairs)
        return Form(lengths, values)

    @property
    def form(self) -> Form:
        """Its own form."""
        return self._form(self.leaves)

    def fault_of_values(self, form: Form) -> str:
        """Return which number or text of a form is another one; nothing if none is.

        Any float is right where this example has a tensor of no dimensions for it.
        """
        faults = (self._fault_of_value(i, x) for i, x in enumerate(form.values))
        return next(filter(None, faults), "")

    def _fault_of_value(self, place: int, value: tuple[Any, ...]) -> str:
        leaf = self.leaves[place]
        if not value or (is_number(leaf) and type(value[-1]) is float):
            return ""
        if value[:2] == (type(leaf), repr(leaf)):
            return ""
        return f"{self.names[place]} is {value[1]}, and it is captured for {leaf!r}"

    def sizes(self, lengths: Lengths) -> dict[Place, int]:
        """Return lengths by place."""
        return {
            (i, dim): size
            for i, shape in enumerate(lengths)
            for dim, size in enumerate(shape, start=self.batched[i])
        }

    def _form(self, leaves: Sequence[Any]) -> Form:
        lengths = (
            tuple(leaf.shape[cut:]) if isinstance(leaf, _ARRAYS) else ()
            for leaf, cut in zip(leaves, self.batched, strict=True)
        )
        values = (
            (type(leaf), repr(leaf), leaf) if isinstance(leaf, PLAIN) else ()
            for leaf in leaves
        )
        return Form(tuple(lengths), tuple(values))

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Example:
        """Return an example with a function applied to every tensor."""
        leaves = tuple(map_tensors(leaf, function) for leaf in self.leaves)
        return replace(self, leaves=leaves)

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the leaves of another batch of the example's form.

        Leaves that are not tensors were fixed when the model was captured. They must be
        equal, but for numbers and texts where it may be captured again (`any_form`).

        Raises:
            ModelError: another structure, or another value that is not a tensor; or a
                leaf is `Shared` here and not in the example, or the other way round.
        """
        known = pytree.tree_unflatten(list(self.names), self.spec)[1]
        ordered = {key: kwargs[key] for key in known if key in kwargs}
        ordered.update({key: x for key, x in kwargs.items() if key not in known})
        leaves, spec = pytree.tree_flatten((tuple(args), ordered))
        if spec != self.spec:
            paths, _ = pytree.tree_flatten_with_path((tuple(args), ordered))
            raise ModelError(
                "these arguments have another structure than the example's: the "
                f"example has {', '.join(self.names)}, these have "
                f"{', '.join(argument_name(path) for path, _ in paths) or 'none'}"
            )
        for name, leaf, old, cut in zip(
            self.names, leaves, self.leaves, self.batched, strict=True
        ):
            rows = num_rows(old), num_rows(unshared(leaf))
            if None not in rows and isinstance(leaf, Shared) == cut:
                raise ModelError(
                    f"argument {name} is {_shown(leaf)}, and in the example it is "
                    f"{'not Shared' if cut else 'Shared'}: give what all samples share "
                    "as hocket.Shared(x) in the example and in every batch"
                )
            _check_same(name, unshared(leaf), old, cut, self.any_form)
        return leaves


def is_number(leaf: object) -> bool:
    """Whether a leaf is a tensor of no dimensions, as a float is captured."""
    return isinstance(leaf, Tensor) and (leaf.ndim, leaf.dtype) == (0, torch.float64)


def argument_name(path: tuple[Any, ...]) -> str:
    """Format a path: `(1, 'mask', 0)` is `mask[0]`; `(0, 2)` is `args[2]`."""
    side, *rest = path
    if side.idx == 0:
        return "args" + "".join(str(key) for key in rest)
    return str(rest[0].key) + "".join(str(key) for key in rest[1:])


def _check_same(name: str, leaf: Any, old: Any, cut: bool, any_form: bool) -> None:
    are_tensors = isinstance(leaf, Tensor) and isinstance(old, Tensor)
    if are_tensors or (isinstance(leaf, _ARRAYS) and type(leaf) is type(old)):
        is_other = leaf.shape[cut:] != old.shape[cut:]
        if any_form:
            is_other = leaf.ndim != old.ndim
        if leaf.dtype != old.dtype or is_other:
            may = "what is Shared keeps its shape"
            if any_form:
                may = "the type and the number of dimensions stay"
            elif cut:
                may = "only the number of samples may change"
            raise ModelError(
                f"argument {name} is {_kind(leaf)}, but the model was captured with "
                f"{_kind(old)}; {may}"
            )
        return
    free = (PerSample, PLAIN) if any_form else (PerSample,)
    if any(isinstance(leaf, kind) and isinstance(old, kind) for kind in free):
        return
    is_other = type(leaf) is not type(old) or isinstance(leaf, _ARRAYS)
    if is_other or leaf != old:
        raise ModelError(
            f"argument {name} is {_shown(leaf)}, but the model was captured with "
            f"{_shown(old)}, which is fixed: give a number as a tensor of no "
            "dimensions, or set it as an attribute of the model before the step"
        )


def _shown(leaf: object) -> str:
    if isinstance(leaf, Shared):
        return f"Shared({_shown(leaf.value)})"
    if isinstance(leaf, PerSample):
        return f"a PerSample of {len(leaf)}"
    return _kind(leaf) if isinstance(leaf, _ARRAYS) else repr(leaf)


def _kind(tensor: Any) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
