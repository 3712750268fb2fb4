"""Reads tensors of a checkpoint, checking each against its hash."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from hocket.run.checkpoint.format.dtypes import BY_NAME
from hocket.run.checkpoint.format.opened import (
    TensorLocation,
    damaged_tensor,
    hash_range,
    open_file,
)

K = TypeVar("K", bound=Hashable)


def read_tensors(locations: Mapping[K, TensorLocation]) -> dict[K, Tensor]:
    """Return tensors by any key, in new memory on the CPU.

    Raises:
        DamagedError: a byte differs from what was saved; names the file.
    """
    by_file: dict[Path, list[tuple[K, TensorLocation]]] = {}
    for key, location in locations.items():
        by_file.setdefault(location.path, []).append((key, location))
    found: dict[K, Tensor] = {}
    for path, wanted in by_file.items():
        with open_file(path) as handle:
            for key, location in sorted(wanted, key=lambda pair: pair[1].begin):
                found[key] = _read(handle, location, str(key))
    return found


def check_tensors(locations: Mapping[str, TensorLocation]) -> None:
    """Read tensors only to check that they are what was saved.

    Raises:
        DamagedError: a byte differs; names the file.
    """
    for name, location in locations.items():
        with open_file(location.path) as handle:
            size = location.record.num_bytes
            found = hash_range(handle, location.begin, size, location.path)
        if found != location.record.sha256:
            raise damaged_tensor(location, name)


def read_tensor(location: TensorLocation, name: str) -> Tensor:
    """Return one tensor.

    Raises:
        DamagedError: a byte differs from what was saved; names the file.
    """
    with open_file(location.path) as handle:
        return _read(handle, location, name)


def _read(handle: int, location: TensorLocation, name: str) -> Tensor:
    record = location.record
    content = torch.empty(record.num_bytes, dtype=torch.uint8)
    view = content.numpy().data
    if (
        hash_range(handle, location.begin, record.num_bytes, location.path, view)
        != record.sha256
    ):
        raise damaged_tensor(location, name)
    return content.view(BY_NAME[record.dtype]).reshape(record.shape)
