"""The blocks of memory behind tensors, which views share."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from hocket.model.trace.local import local


def memory_of(tensor: Tensor) -> int:
    """Return a number that is equal for tensors in one block of memory."""
    return (
        id(tensor) if tensor.is_sparse else local(tensor).untyped_storage().data_ptr()
    )


def num_bytes_held(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that tensors hold, each block of memory once."""
    storages = [local(x).untyped_storage() for x in tensors]
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())
