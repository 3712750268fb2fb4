"""The uncut model's names, shapes and types, without values.

Each worker trains its own stages. Keeping the whole model for its names would keep the
other workers' weights in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from hocket.model.stages.on_tensors import on_meta
from hocket.model.trace.state import State


@dataclass(frozen=True, slots=True)
class Outline:
    """The uncut model, without its values.

    Args:
        state: its parameters and buffers, on the meta device.
        names: the names in its `state_dict()`, in that order.
        kind: the name of its class.
        config: the config of a model of the transformers library; None for any other.
    """

    state: State
    names: tuple[str, ...]
    kind: str
    config: Any

    @classmethod
    def of(cls, model: nn.Module) -> Outline:
        """Return a model's outline, which does not refer to the model."""
        state = State.of(model)
        tensors = {name: on_meta(tensor) for name, tensor in state.tensors.items()}
        config: Any = getattr(model, "config", None)
        return cls(
            replace(state, tensors=tensors),
            tuple(model.state_dict()),
            type(model).__name__,
            config if hasattr(config, "to_json_string") else None,
        )

    @property
    def parameter_bytes(self) -> int:
        """The bytes of all parameters together."""
        return sum(
            tensor.nbytes
            for name, tensor in self.state.tensors.items()
            if self.state.is_parameter(name)
        )

    def tensor(self, name: str) -> Tensor:
        """Return a tensor on `meta`, by any of its names."""
        return self.state.tensors[self.state.first_name[name]]
