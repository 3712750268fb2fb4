"""Weights in files, and how their names, shapes and types fit a model's.

Nothing is read but names and forms until a tensor is needed. Types are converted as
`load_state_dict` does, where no number changes its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
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
