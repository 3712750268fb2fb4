"""Read tensors of a checkpoint: each is compared with its hash before it is given."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from hocket.run.checkpoint.format.dtypes import BY_NAME
from hocket.run.checkpoint.format.opened import (
    Place,
    damaged_tensor,
    hash_range,
    open_file,
)

K = TypeVar("K", bound=Hashable)


def read_tensors(places: Mapping[K, Place]) -> dict[K, Tensor]:
    """Tensors by any key, in new memory on the CPU.

    Raises:
        DamagedError: a byte differs from what was saved; names the file.
    """
    by_file: dict[Path, list[tuple[K, Place]]] = {}
    for key, place in places.items():
        by_file.setdefault(place.path, []).append((key, place))
    found: dict[K, Tensor] = {}
    for path, wanted in by_file.items():
        with open_file(path) as handle:
            for key, place in sorted(wanted, key=lambda pair: pair[1].begin):
                found[key] = _read(handle, place, str(key))
    return found


def check_tensors(places: Mapping[str, Place]) -> None:
    """Read tensors only to see that they are what was saved.

    Raises:
        DamagedError: a byte differs; names the file.
    """
    for name, place in places.items():
        with open_file(place.path) as handle:
            size = place.record.num_bytes
            found = hash_range(handle, place.begin, size, place.path)
        if found != place.record.sha256:
            raise damaged_tensor(place, name)


def read_tensor(place: Place, name: str) -> Tensor:
    """One tensor.

    Raises:
        DamagedError: a byte differs from what was saved; names the file.
    """
    with open_file(place.path) as handle:
        return _read(handle, place, name)


def _read(handle: int, place: Place, name: str) -> Tensor:
    record = place.record
    content = torch.empty(record.num_bytes, dtype=torch.uint8)
    view = content.numpy().data
    if (
        hash_range(handle, place.begin, record.num_bytes, place.path, view)
        != record.sha256
    ):
        raise damaged_tensor(place, name)
    return content.view(BY_NAME[record.dtype]).reshape(record.shape)
