"""Recipes' models of one form are exported once for all tests of a process.

To export a model takes two thirds of a short run's time, and many runs have the same
model. What has the same modules with the same settings, and tensors of the same forms
under the same names, does the same; its numbers are no part of what is exported.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from hocket.model.capture.export import export
from hocket.model.trace.example import Example
from hocket.model.trace.state import State

_FOUND: Final[dict[Hashable, ExportedProgram]] = {}


def export_once(patch: pytest.MonkeyPatch) -> None:
    """Do so in this process, until the patch is undone."""
    patch.setattr("hocket.model.capture.capture.export", _export)


def _export(model: nn.Module, example: Example, *, any_batch: bool) -> ExportedProgram:
    if any(not type(x).__module__.startswith(_KNOWN) for x in model.modules()):
        return export(model, example, any_batch=any_batch)
    key = (_form_of(model), _form_of_example(example), any_batch)
    if key not in _FOUND:
        _FOUND[key] = export(model, example, any_batch=any_batch)
    return _FOUND[key]


_KNOWN: Final = ("torch.nn.", "hocket.recipes.")  # whose settings are all attributes


def _form_of(model: nn.Module) -> Hashable:
    state = State.of(model)
    modules = [
        (name, type(module), _settings(module))
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    tensors = [(names, _form(state.tensors[x])) for x, names in state.names.items()]
    return str(modules), str(tensors), torch.is_autocast_enabled("cpu")


def _settings(module: nn.Module) -> dict[str, object]:
    return {
        name: value for name, value in vars(module).items() if not name.startswith("_")
    }


def _form_of_example(example: Example) -> Hashable:
    leaves = [_form(x) if isinstance(x, Tensor) else x for x in example.leaves]
    return str(leaves), str(example.spec), example.num_samples


def _form(x: Tensor) -> Any:
    return x.dtype, x.shape, x.requires_grad
