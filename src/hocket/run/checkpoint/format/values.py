"""Encodes Python values as JSON and back: the state of optimizers and schedules.

    {"#tensor": "encoder.weight/exp_avg", "host": true}    in a tensor file, that name
    {"#tuple": [0.9, 0.999]}    {"#counter": [[10, 1]]}    {"#pairs": [[0, 0.1]]}

Everything else is plain JSON. Numbers come back as they were, bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

from torch import Tensor

from hocket.errors import CheckpointError, DamagedError

_TENSOR: Final = "#tensor"
_TUPLE: Final = "#tuple"
_COUNTER: Final = "#counter"
_PAIRS: Final = "#pairs"


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
