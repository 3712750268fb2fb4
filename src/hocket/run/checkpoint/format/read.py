"""Reads tensors of a checkpoint, checking each against its hash."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hocket.run.checkpoint.format.dtypes import BY_NAME
from hocket.run.checkpoint.format.opened import (
    K,
    TensorLocation,
    check_tensor,
    opened_files,
)


def read_tensors(locations: Mapping[K, TensorLocation]) -> dict[K, Tensor]:
    """Return tensors by any key, in new memory on the CPU.

    Raises:
        DamagedError: a byte differs from what was saved; names the file.
    """
    found: dict[K, Tensor] = {}
    for handle, key, location in opened_files(locations):
        record = location.record
        content = torch.empty(record.num_bytes, dtype=torch.uint8)
        check_tensor(handle, location, str(key), content.numpy().data)
        found[key] = content.view(BY_NAME[record.dtype]).reshape(record.shape)
    return found


def read_tensor(location: TensorLocation, name: str) -> Tensor:
    """Return one tensor.

    Raises:
        DamagedError: a byte differs from what was saved; names the file.
    """
    return read_tensors({name: location})[name]
