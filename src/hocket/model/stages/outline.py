"""The uncut model's names, shapes and types, without values.

Each worker trains its own stages. Keeping the whole model for its names would keep the
other workers' weights in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from hocket.model.stages.on_tensors import on_meta
from hocket.model.stages.saved_modules import SavedModules, state_names
from hocket.model.trace.state import State


@dataclass(frozen=True, slots=True)
class Outline:
    """The uncut model, without its values.

    Args:
        state: its parameters and buffers, on the meta device.
        names: the names in its `state_dict()`, in that order.
        modules: its modules with an extra state or hooks of their own.
        kind: the name of its class.
        config: the config of a model of the transformers library; None for any other.
    """

    state: State
    names: tuple[str, ...]
    modules: SavedModules
    kind: str
    config: Any

    @classmethod
    def of(cls, model: nn.Module) -> Outline:
        """Return a model's outline, which does not refer to the model's tensors.

        Raises:
            ModelError: a module saves more than parameters, buffers and extra state.
        """
        state = State.of(model)
        tensors = {name: on_meta(tensor) for name, tensor in state.tensors.items()}
        config: Any = getattr(model, "config", None)
        return cls(
            replace(state, tensors=tensors),
            state_names(model, state),
            SavedModules({"": model}),
            type(model).__name__,
            config if hasattr(config, "to_json_string") else None,
        )

    def joined(self, others: Mapping[str, Outline]) -> Outline:
        """Return this outline with those of other models, under names of their own.

        Args:
            others: by the name that comes before theirs, and a dot.
        """
        state, names = self.state, self.names
        for name, other in others.items():
            state = state.joined(name, other.state)
            names += tuple(f"{name}.{x}" for x in other.names)
        modules = self.modules.joined({key: x.modules for key, x in others.items()})
        return replace(self, state=state, names=names, modules=modules)

    @property
    def parameter_bytes(self) -> int:
        """The bytes of all parameters together."""
        return sum(
            tensor.nbytes
            for name, tensor in self.state.tensors.items()
            if self.state.is_parameter(name)
        )

    def num_parameters(self, frozen: Collection[str]) -> tuple[int, int]:
        """Return how many numbers train, and how many do not.

        Args:
            frozen: the names in frozen stages, which do not train.
        """
        stopped, counts = {*frozen}, [0, 0]
        for name, tensor in self.state.tensors.items():
            if self.state.is_parameter(name):
                is_frozen = name in stopped or not tensor.requires_grad
                counts[is_frozen] += tensor.numel()
        return counts[0], counts[1]

    def tensor(self, name: str) -> Tensor:
        """Return a tensor on `meta`, by any of its names."""
        return self.state.tensors[self.state.first_name[name]]
