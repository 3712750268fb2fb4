"""Reads files of `torch.save` without running code."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

import torch

from hocket.errors import CheckpointError

_MAX_DEPTH: Final = 64
_MAX_ENTRIES: Final = 1_000_000


def load_values(source: Path | IO[bytes]) -> Any:
    """Return what such a file holds, on the CPU.

    Raises:
        CheckpointError: it cannot be read, or names code. The caller names the file.
    """
    try:
        with warnings.catch_warnings():  # about what it then refuses
            warnings.simplefilter("ignore", UserWarning)
            return torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        first = str(error).strip().split("\n", 1)[0]
        raise CheckpointError(
            "it holds more than tensors and plain values, so reading it could run "
            f"code; it is not read ({first}). Where you trust it, load it yourself and "
            "save the state dict alone"
        ) from error
    except Exception as error:  # a damaged file may fail in any way
        raise CheckpointError(
            f"it cannot be read: {type(error).__name__}: {error}"
        ) from error


def flattened(values: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of nested dicts: `{"model": {"a": x}}` has `model.a`.

    Raises:
        CheckpointError: the dicts are nested too deeply, as one that contains itself.
    """
    num_entries = 0
    for num_entries, entry in enumerate(_entries(values, "", 0), 1):
        if num_entries > _MAX_ENTRIES:
            raise CheckpointError(f"it has more than {_MAX_ENTRIES:,} entries")
        yield entry


def _entries(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield path, value
        return
    if depth > _MAX_DEPTH:
        raise CheckpointError(
            f"{path[:80]}... is nested more than {_MAX_DEPTH} dicts deep, or contains "
            "itself: save the state dict alone"
        )
    for key, x in value.items():
        yield from _entries(x, f"{path}.{key}" if path else str(key), depth + 1)
