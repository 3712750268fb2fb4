"""The types that safetensors supports, and their names in torch."""

from __future__ import annotations

from typing import Final

import torch

from hocket.errors import CheckpointError

BY_NAME: Final = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES: Final = {dtype: name for name, dtype in BY_NAME.items()}


def name_of(dtype: torch.dtype, tensor_name: str) -> str:
    """Return safetensors' name of a type.

    Raises:
        CheckpointError: it has no name for this type.
    """
    if dtype not in _NAMES:
        raise CheckpointError(
            f"{tensor_name} is of type {dtype}, which safetensors cannot hold"
        )
    return _NAMES[dtype]
