"""Everything of a model that capturing it must leave alone.

Values, flags, hooks and attributes of its modules, all that a forward of it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """A model at one time.

    Args:
        attributes: every attribute of every module, by path and name.
        tensors: the values of parameters and buffers, and whether they are trained.
    """

    attributes: Mapping[str, Any]
    tensors: Mapping[str, tuple[Tensor, bool]]

    @classmethod
    def of(cls, model: nn.Module) -> ModelSnapshot:
        """Take it."""
        attributes = {
            f"{path}: {name}": _held(value)
            for path, module in model.named_modules()
            for name, value in vars(module).items()
        }
        named = [*model.named_parameters(), *model.named_buffers()]
        tensors = {name: (x.detach().clone(), x.requires_grad) for name, x in named}
        return cls(attributes, tensors)

    def changes(self, model: nn.Module) -> list[str]:
        """Return the names of what is different now."""
        now = ModelSnapshot.of(model)
        keys = self.attributes.keys() | now.attributes.keys()
        changed = [
            key for key in keys if self.attributes.get(key) != now.attributes.get(key)
        ]
        for name, (value, trained) in self.tensors.items():
            other, is_trained = now.tensors[name]
            if trained != is_trained or not torch.equal(value, other):
                changed.append(name)
        return sorted(changed)


def _held(value: Any) -> Any:
    """The identities of what an attribute holds, or the value of a plain one."""
    if isinstance(value, dict):
        return [(key, id(x)) for key, x in value.items()]
    if isinstance(value, set):
        return sorted(map(id, value))
    if isinstance(value, list | tuple):
        return [id(x) for x in value]
    return value if isinstance(value, bool | int | float | str) else id(value)
