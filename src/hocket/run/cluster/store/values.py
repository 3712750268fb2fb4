"""Encodes Python values as JSON and back: the state of optimizers and schedules.

    {"#tensor": "encoder.weight/exp_avg", "host": true}    in a tensor file, that name
    {"#tuple": [0.9, 0.999]}    {"#counter": [[10, 1]]}    {"#pairs": [[0, 0.1]]}

Everything else is plain JSON. Numbers come back as they were, bit for bit.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from hocket.errors import CheckpointError, DamagedError, ModelError
from hocket.run.diagnostics.job_folder import Json

_TENSOR: Final = "#tensor"
_TUPLE: Final = "#tuple"
_COUNTER: Final = "#counter"
_PAIRS: Final = "#pairs"
_MOST_BYTES: Final = 2**22  # that travel as JSON


def encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Encode a value as JSON.

    Args:
        value: numbers, texts, tensors, and lists, tuples and dicts of them.
        path: prefixes the names of its tensors, and is named in errors.
        tensors: the tensors that are found are added here.

    Raises:
        CheckpointError: it holds something else, such as a function.
    """
    match value:
        case None | bool() | str():
            return value
        case int():
            return int(value)
        case float():
            return float(value)
        case Tensor():
            tensors[path] = value
            return {_TENSOR: path, "host": value.device.type == "cpu"}
        case list():
            return _all(value, path, tensors)
        case tuple():
            return {_TUPLE: _all(value, path, tensors)}
        case dict():
            return _encode_dict(value, path, tensors)
        case _:
            raise CheckpointError(
                f"{path} is a {type(value).__module__}.{type(value).__qualname__}, "
                "which a checkpoint cannot hold: it holds numbers, texts, tensors, and "
                "lists, tuples and dicts of them"
            )


def decode(value: Any, tensor: Callable[[str, bool], Tensor]) -> Any:
    """Return the value that `encode` was given.

    Args:
        value: JSON.
        tensor: returns the tensor of a name, and whether it was on the host.
    """
    if isinstance(value, list):
        return [decode(x, tensor) for x in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensor(value[_TENSOR], bool(value.get("host")))
    if _TUPLE in value:
        return tuple(decode(x, tensor) for x in value[_TUPLE])
    for tag, kind in ((_COUNTER, Counter), (_PAIRS, dict)):
        if tag in value:
            return kind({key: decode(x, tensor) for key, x in value[tag]})
    return {key: decode(x, tensor) for key, x in value.items()}


def pack(value: Any, name: str) -> Json:
    """Encode a value with all of its tensors as JSON.

    Args:
        value: see `encode`.
        name: its name, for errors.

    Raises:
        ModelError: it holds something else, or is too large.
    """
    tensors: dict[str, Tensor] = {}
    try:
        encoded = encode(value, name, tensors)
    except CheckpointError as error:
        raise ModelError(str(error)) from None
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    if num_bytes > _MOST_BYTES:
        raise ModelError(
            f"{name} has {num_bytes:,} bytes of tensors, and may have {_MOST_BYTES:,}: "
            "keep large tensors in buffers"
        )
    data = {}
    for path, tensor in tensors.items():
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        content = flat.reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(tensor.dtype).removeprefix("torch.")
        data[path] = [dtype, list(tensor.shape), base64.b64encode(content).decode()]
    return [encoded, data]


def unpack(packed: Any) -> Any:
    """Return the value that `pack` was given, with its tensors on the CPU."""
    encoded, data = packed

    def tensor(path: str, _: bool) -> Tensor:
        dtype, shape, text = data[path]
        content = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        return content.view(getattr(torch, dtype)).reshape(shape)

    return decode(encoded, tensor)


def tensor_names(value: Any) -> Iterator[str]:
    """Yield the tensor names in an encoded value."""
    if isinstance(value, list):
        for x in value:
            yield from tensor_names(x)
    elif isinstance(value, dict):
        if _TENSOR in value:
            if not isinstance(value[_TENSOR], str):
                raise DamagedError(f"a tensor's name is {value[_TENSOR]!r}")
            yield value[_TENSOR]
        else:
            yield from tensor_names(list(value.values()))


def _all(values: Any, path: str, tensors: dict[str, Tensor]) -> list[Any]:
    return [encode(x, f"{path}/{i}", tensors) for i, x in enumerate(values)]


def _encode_dict(value: dict[Any, Any], path: str, tensors: dict[str, Tensor]) -> Any:
    items = [(key, encode(x, f"{path}/{key}", tensors)) for key, x in value.items()]
    if isinstance(value, Counter):
        return {_COUNTER: [list(item) for item in items]}
    if any(not isinstance(key, str) or key.startswith("#") for key in value):
        for key in value:
            if not isinstance(key, bool | int | float | str):
                raise CheckpointError(
                    f"{path} has a key of type {type(key).__name__}, which a "
                    "checkpoint cannot hold"
                )
        return {_PAIRS: [list(item) for item in items]}
    return dict(items)
