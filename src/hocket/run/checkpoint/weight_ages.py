"""Several tensors of one weight, told apart by age: `name/1` is the youngest."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count

import torch
from torch import Tensor

from hocket.errors import DamagedError
from hocket.run.checkpoint.format.opened import TensorLocation


def by_age(name: str, tensors: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Some tensors of a weight, the oldest first, each with its own name."""
    for i, tensor in enumerate(tensors):
        yield f"{name}/{len(tensors) - i}", tensor


def names_by_age(known: Collection[str], name: str) -> list[str]:
    """The names of all tensors of a weight that are known, the oldest first."""
    num = next(age for age in count() if f"{name}/{age + 1}" not in known)
    return [f"{name}/{age}" for age in range(num, 0, -1)]


def form_checked(
    locations: Mapping[str, TensorLocation],
    names: Sequence[str],
    weight: TensorLocation,
) -> dict[str, TensorLocation]:
    """Where some tensors of a weight are.

    Args:
        locations: of tensors, by their names.
        names: of those that are wanted.
        weight: where the weight itself is.

    Raises:
        DamagedError: one is of another form than that.
    """
    form = weight.record.dtype, weight.record.shape
    for name in names:
        record = locations[name].record
        if (record.dtype, record.shape) != form:
            raise DamagedError(
                f"{locations[name].path}: {name} has another shape or type than the "
                "weight that it belongs to"
            )
    return {name: locations[name] for name in names}


def like(parameter: Tensor, value: Tensor) -> Tensor:
    """A copy where the parameter is, in the same memory order."""
    return torch.empty_like(parameter.detach()).copy_(value)
