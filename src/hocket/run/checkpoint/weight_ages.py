"""Names several tensors of one weight by age: `name/1` is the youngest."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count

import torch
from torch import Tensor

from hocket.errors import DamagedError
from hocket.run.checkpoint.format.opened import TensorLocation


def by_age(name: str, tensors: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Return tensors of a weight, the oldest first, each with its own name."""
    for i, tensor in enumerate(tensors):
        yield f"{name}/{len(tensors) - i}", tensor


def names_by_age(known: Collection[str], name: str) -> list[str]:
    """Return the names of all known tensors of a weight, the oldest first."""
    num = next(age for age in count() if f"{name}/{age + 1}" not in known)
    return [f"{name}/{age}" for age in range(num, 0, -1)]


def form_checked(
    locations: Mapping[str, TensorLocation],
    names: Sequence[str],
    weight: TensorLocation,
) -> dict[str, TensorLocation]:
    """Return the locations of some tensors of a weight.

    Args:
        locations: the tensors' locations, by name.
        names: the names to return.
        weight: the weight's own location.

    Raises:
        DamagedError: a tensor has another form than the weight.
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
    """Return a copy on the parameter's device, with its strides."""
    return torch.empty_like(parameter.detach()).copy_(value)
