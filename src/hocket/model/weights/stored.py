"""Weights in files, and how their names, shapes and types fit a model's.

Nothing is read but names and forms until a tensor is needed. Types are converted as
`load_state_dict` does, where no number changes its kind.

Safetensors are one file, or a folder with an index. They are mapped: what is not read
costs nothing, and what is read is no memory of the process but of the machine's cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hocket.errors import ModelError
from hocket.model.trace.state import State, overwrite
from hocket.nearest import nearest

Form: TypeAlias = tuple[str, tuple[int, ...]]  # a type such as "float32", and a shape

_NUM_SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The tensors of some files, by name.

    Args:
        where: the folder or file, for errors.
        forms: each tensor's type and shape.
        read: yields tensors by name, one at a time; the caller copies each.
        extra: the extra states of modules, by name.
        not_asked: names that may be there, and that no model needs.
    """

    where: str
    forms: Mapping[str, Form]
    read: Callable[[Collection[str]], Iterator[tuple[str, Tensor]]]
    extra: Mapping[str, Any] = field(default_factory=dict)
    not_asked: Callable[[str], bool] = field(default=lambda _: False)

    def names_for(self, state: State) -> dict[str, tuple[str, ...]]:
        """Return the names in the files of each tensor, by its first name in a model.

        A tied weight may have any of its names, or several.

        Args:
            state: the model's.

        Raises:
            ModelError: a name is missing or superfluous, or a tensor of another form;
                lists the nearest.
        """
        found: dict[str, tuple[str, ...]] = {}
        unknown = []
        for name in self.forms:
            if (first := state.first_name.get(name)) is not None:
                found[first] = (*found.get(first, ()), name)
            elif not self.not_asked(name):
                unknown.append(name)
        missing = [
            first
            for first, names in state.names.items()
            if first not in found and not state.persistent.isdisjoint(names)
        ]
        misfits = [
            f"{name} {fault}"
            for first, names in found.items()
            for name in names
            if (fault := _misfit(self.forms[name], state.tensors[first]))
        ]
        if faults := [*_unmatched(missing, unknown, self.forms), *misfits]:
            more = f"; and {len(faults) - _NUM_SHOWN} more"
            raise ModelError(
                f"{self.where} has not the weights of this model: "
                f"{'; '.join(faults[:_NUM_SHOWN])}"
                f"{more if len(faults) > _NUM_SHOWN else ''}. Nothing was read"
            )
        return found

    def fill(
        self, tensors: Mapping[str, Tensor], names: Mapping[str, Sequence[str]]
    ) -> None:
        """Write tensors' values in place.

        Args:
            tensors: the model's, by first name.
            names: the names in the files, by first name; see `names_for`.

        Raises:
            ModelError: a tied weight has two values in the files.
        """
        first_of = {name: first for first in tensors for name in names[first]}
        written = dict[str, str]()
        for name, value in self.read(first_of):
            first = first_of[name]
            own = tensors[first]
            if first not in written:
                overwrite(own, value)
                written[first] = name
            elif not torch.equal(own.detach(), value.to(own.dtype)):
                raise ModelError(
                    f"{self.where} has two values of one weight: in this model "
                    f"{written[first]} and {name} are tied. Tie them in the files, or "
                    "untie them in the model"
                )


def _misfit(form: Form, tensor: Tensor) -> str:
    """Return why a stored tensor cannot become a model's; empty if it can."""
    (kind, shape), dtype = form, tensor.dtype
    if shape != tuple(tensor.shape):
        return f"has the shape {shape} there, and {tuple(tensor.shape)} in the model"
    own = str(dtype).removeprefix("torch.")
    if kind == own:
        return ""
    if "float8" in kind or "float4" in kind:
        return (
            f"is {kind} there, which has a scale of its own, and {own} in the model: "
            "save it dequantized"
        )
    stored: torch.dtype | None = getattr(torch, kind, None)
    if stored is None:
        return f"is of the type {kind} there, which torch does not have"
    if not torch.can_cast(stored, dtype):
        return f"is {kind} there, and {own} in the model, which would lose a part of it"
    if dtype.is_floating_point and not stored.is_floating_point:
        return f"is {kind} there (quantized?), and {own} in the model: save it as {own}"
    return ""


def _unmatched(
    missing: Sequence[str], unknown: Sequence[str], there: Collection[str]
) -> Iterator[str]:
    """Yield sentences about names that are on one side alone."""
    if prefix := _prefix_between(missing, there):
        side, how = prefix
        yield (
            f"all names {'there' if side else 'in the model'} begin with {how!r}, and "
            f"those {'in the model' if side else 'there'} do not (such as "
            f"{missing[0]}): give the module that has these names, or save the files "
            "under the model's names"
        )
        return
    for name in missing:
        yield f"it has no {name}; {nearest(name, unknown or list(there))}"
    for name in unknown:
        close = nearest(name, missing) if missing else "the model has no such name"
        yield f"it has {name}, which is no name of the model: {close}"


def _prefix_between(
    missing: Sequence[str], there: Collection[str]
) -> tuple[bool, str] | None:
    """Return the prefix that one side has, and whether that is the files'."""
    if not missing:
        return None
    for name in there:
        if name.endswith(f".{missing[0]}"):
            prefix = name.removesuffix(missing[0])
            if all(f"{prefix}{x}" in there for x in missing):
                return True, prefix
    parts = missing[0].split(".")
    for i in range(1, len(parts)):
        prefix = ".".join(parts[:i]) + "."
        own = [x for x in missing if x.startswith(prefix)]
        if len(own) == len(missing) and all(
            x.removeprefix(prefix) in there for x in own
        ):
            return False, prefix
    return None


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
