"""Tensor files are safetensors files, and come back bit for bit."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from hocket.errors import CheckpointError
from hocket.run.checkpoint.format.manifest import ITEM_BYTES, Section, TensorFile
from hocket.run.checkpoint.format.opened import BY_NAME, TensorLocation, read_tensors
from hocket.run.checkpoint.format.tensor_file import TensorSource, write_tensors


def written(path: Path, tensors: dict[str, Tensor]) -> TensorFile:
    """A file of these."""
    sources = {name: TensorSource.of(name, x) for name, x in tensors.items()}
    return write_tensors(path, Section.WEIGHTS, sources, {"a": "b"})


def tensors_of_all_kinds() -> dict[str, Tensor]:
    """Every type; without entries, without dimensions, not contiguous."""
    bits = torch.randint(0, 2, (3, 16), dtype=torch.uint8)
    kinds = {str(x): bits.clone().view(x).clone() for x in BY_NAME.values()}
    return kinds | {
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
    }


def test_other_programs_read_the_file(tmp_path: Path) -> None:
    """With safetensors' own reader: all tensors, types and metadata.

    But files with complex128, for which safetensors has no name.
    """
    tensors = tensors_of_all_kinds()
    del tensors["torch.complex128"]
    path = tmp_path / "weights-0.safetensors"
    written(path, tensors)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        a, b = (x.detach().contiguous().reshape(-1) for x in (found[name], tensor))
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "a": "b"}


def test_records_say_what_is_where(tmp_path: Path) -> None:
    """Every byte is in the header or in one tensor, and hashed."""
    tensors = tensors_of_all_kinds()
    path = tmp_path / "weights-0.safetensors"
    file = written(path, tensors)
    content = path.read_bytes()
    assert file.num_bytes == len(content)
    header = content[: file.header_bytes]
    assert hashlib.sha256(header).hexdigest() == file.header_sha256
    at = file.header_bytes
    for _, record, begin in file.locations():
        assert begin == at
        at += record.num_bytes
        assert hashlib.sha256(content[begin:at]).hexdigest() == record.sha256
    assert at == len(content)
    locations = {
        name: TensorLocation(path, begin, x) for name, x, begin in file.locations()
    }
    for name, found in read_tensors(locations).items():
        assert found.dtype == tensors[name].dtype
        assert found.shape == tensors[name].shape


def test_sizes_are_those_of_torch() -> None:
    """The table without torch, and torch's own."""
    assert {name: x.itemsize for name, x in BY_NAME.items()} == ITEM_BYTES


def test_what_the_format_cannot_hold_is_refused() -> None:
    """By name, before anything is written."""
    small: torch.dtype = vars(torch)["uint4"]
    with pytest.raises(CheckpointError, match=r"w is of type torch\.uint4"):
        TensorSource.of("w", torch.empty(2, dtype=small))
    with pytest.raises(CheckpointError, match="w is a sparse"):
        TensorSource.of("w", torch.eye(3).to_sparse())
