"""Opens safetensors: one file, or a folder with an index.

Files are mapped: what is not read costs nothing, and what is read is no memory of the
process but of the machine's cache.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hocket.errors import ModelError
from hocket.model.weights.stored import Form, StoredWeights

_INDEX: Final = "*.safetensors.index.json"
_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_TYPES: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}


def open_folder(path: Path) -> StoredWeights:
    """Open a safetensors file, or a folder of them.

    Raises:
        ModelError: it is none, or lacks a file, or one is damaged.
    """
    places = {path.name: [path]} if path.is_file() else _files_in(path)
    forms: dict[str, Form] = {}
    at: dict[str, Path] = {}
    for file in dict.fromkeys(x for files in places.values() for x in files):
        for name, form in _forms_in(file):
            if name in at:
                raise ModelError(
                    f"{path} has {name} twice: in {at[name].name} and in {file.name}. "
                    "Give one of the files, or a folder with an index"
                )
            forms[name], at[name] = form, file
    return StoredWeights(str(path), forms, lambda names: _read(at, names))


def _files_in(path: Path) -> Mapping[str, list[Path]]:
    """Return a folder's files, by the name of what lists them.

    Raises:
        ModelError: there is none, or the index lists one that is not there.
    """
    if not path.is_dir():
        raise ModelError(
            f"weights={str(path)!r} is neither a file nor a folder here: give a folder "
            "of safetensors, one such file, a checkpoint of hocket, or hocket.init()"
        )
    indexes = sorted(path.glob(_INDEX))
    if len(indexes) > 1:
        listed = ", ".join(x.name for x in indexes)
        raise ModelError(f"{path} has several indexes ({listed}): give a folder of one")
    if indexes:
        names = sorted({*_index(indexes[0]).values()})
        missing = [x for x in names if not (path / x).is_file()]
        if missing:
            raise ModelError(
                f"{indexes[0]} lists {len(names)} files, of which {len(missing)} are "
                f"not there, such as {missing[0]}: half of a checkpoint was copied"
            )
        return {indexes[0].name: [path / x for x in names]}
    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickles = [x.name for kind in _PICKLES for x in sorted(path.glob(kind))]
        why = (
            f"; {pickles[0]} is a pickle, which could run code: convert it "
            "(safetensors.torch.save_file)"
            if pickles
            else ""
        )
        raise ModelError(f"{path} has no *.safetensors{why}")
    return {"": files}


def _index(path: Path) -> dict[str, str]:
    """Read which file has which tensor.

    Raises:
        ModelError: it is no such index, or names files elsewhere.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        found = dict(content["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} is no index of safetensors: {error!r}") from error
    for name, file in found.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(
                f"{path} says that {name} is in {file!r}, no file beside it"
            )
    return found


def _forms_in(file: Path) -> Iterator[tuple[str, Form]]:
    try:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (no mapping)
                part = opened.get_slice(name)
                kind = str(part.get_dtype())
                yield name, (_TYPES.get(kind, kind), tuple(part.get_shape()))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _read(
    at: Mapping[str, Path], names: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors whose memory is the file's."""
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(at[name], []).append(name)
    for file, own in by_file.items():
        try:
            with safe_open(file, "pt") as opened:
                for name in own:
                    yield name, opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
