"""A model's parameters and buffers by name, tied ones under all of their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class State:
    """Every parameter and buffer of a model, under the first of its names.

    Args:
        tensors: the tensors by name; parameters first, both in the model's own order.
        names: every name of a tensor, by its first name. Tied tensors have several.
        first_name: the first name, by any name.
        persistent: the names that `state_dict()` has.
    """

    tensors: Mapping[str, Tensor]
    names: Mapping[str, tuple[str, ...]]
    first_name: Mapping[str, str]
    persistent: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module) -> State:
        """Read the names from the model."""
        every: dict[str, Tensor] = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        first_of: dict[int, str] = {}
        for name, tensor in every.items():
            first_of.setdefault(id(tensor), name)
        first_name = {name: first_of[id(tensor)] for name, tensor in every.items()}
        names: dict[str, tuple[str, ...]] = {}
        for name, first in first_name.items():
            names[first] = (*names.get(first, ()), name)
        tensors = {first: every[first] for first in names}
        persistent = frozenset(every) - _left_out_of_state_dict(model)
        return cls(tensors, names, first_name, persistent)

    @property
    def trained(self) -> dict[str, Tensor]:
        """The tensors that want a gradient, by name."""
        return {name: x for name, x in self.tensors.items() if x.requires_grad}

    def is_parameter(self, name: str) -> bool:
        """Return whether a name is a parameter's rather than a buffer's."""
        return isinstance(self.tensors[self.first_name[name]], nn.Parameter)

    def below(self, path: str) -> tuple[str, ...]:
        """Return the first names of all tensors of the module at `path`."""
        prefix = f"{path}." if path else ""
        names = self.first_name.items()
        found = (first for name, first in names if name.startswith(prefix))
        return tuple(dict.fromkeys(found))


def saved_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers under all names; no hook is called."""
    state = State.of(module)
    found = state.first_name.items()
    return {k: state.tensors[first] for k, first in found if k in state.persistent}


def _left_out_of_state_dict(model: nn.Module) -> frozenset[str]:
    return frozenset(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    )
