"""Replaces a stage's parameters by other tensors for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

from torch import Tensor, nn

from hocket.errors import ModelError


class ParameterSlots:
    """The places of trained parameters; one parameter may be in several modules.

    Filling them exchanges entries of the modules' own dicts; the parameters stay the
    same objects.

    Args:
        module: the stage.
        trained: its parameters by name.
    """

    def __init__(self, module: nn.Module, trained: Mapping[str, nn.Parameter]) -> None:
        names = {id(parameter): name for name, parameter in trained.items()}
        self._slots = [
            (_entries(part), key, names[id(parameter)], parameter)
            for part in module.modules()
            for key, parameter in part._parameters.items()
            if id(parameter) in names
        ]

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Let the module compute with these tensors, by name, until `empty`."""
        for slots, key, name, _ in self._slots:
            slots[key] = tensors[name]

    def empty(self) -> None:
        """Put the parameters back."""
        for slots, key, name, parameter in self._slots:
            # Old weights, also those of another stage, are no parameters.
            if slots[key] is not parameter and isinstance(slots[key], nn.Parameter):
                raise ModelError(
                    f"{name} was replaced between two steps, while its place held an "
                    "older version of it: copy the values in place (`with "
                    "torch.no_grad(): old.copy_(new)`), or make a new pipeline"
                )
            slots[key] = parameter

    @contextmanager
    def filled(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the module compute with these tensors for a while."""
        try:
            self.fill(tensors)
            yield
        finally:
            self.empty()


def _entries(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own parameters, by name; any tensor may replace them."""
    return cast("dict[str, Tensor | None]", module._parameters)
