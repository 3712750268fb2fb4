"""Models of one form are exported once for all tests of a process.

Exporting a model takes most of the time of a short run, and many runs have the same
model. Models with the same modules and settings, and tensors of the same forms under
the same names, have one graph; the values of weights are no part of it. With an open
number of samples the exporter chooses its own number, so the example's plays no part.

Processes that are forked from this one begin with its exports.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from hocket.model.capture.as_is import ModulesAsIs
from hocket.model.capture.export import export
from hocket.model.capture.sequential import has_hooks
from hocket.model.trace.example import Example
from hocket.model.trace.sizes import OpenSizes
from hocket.model.trace.state import State

Exported: TypeAlias = tuple[ExportedProgram, OpenSizes]

_FOUND: Final[dict[Hashable, Exported]] = {}
# Packages and modules whose classes keep all their settings in attributes.
_KNOWN: Final = (
    "torch.nn.",
    "hocket.recipes.",
    "transformers.activations",
    "transformers.models.",
    "transformers.pytorch_utils",
    "tests.run.stage.split.test_parameters",
    "tests.run.support.emulated_teachers",
    "tests.run.support.freezing_workers",
    "tests.run.support.small_models",
    "tests.run.support.teacher_models",
    "tests.run.support.program_workers",
)


def export_once(patch: pytest.MonkeyPatch) -> None:
    """Share exports in this process, until the patch is undone."""
    patch.setattr("hocket.model.capture.capture.export", _export)


def _export(
    model: nn.Module, example: Example, *, num_samples: int, as_is: ModulesAsIs
) -> Exported:
    if as_is.closed or not all(_is_known(module) for module in model.modules()):
        return export(model, example, num_samples=num_samples, as_is=as_is)
    form = _form_of_example(example.resized(num_samples) if num_samples else example)
    key = (_form_of(model), form, num_samples)
    if key not in _FOUND:
        _FOUND[key] = export(model, example, num_samples=num_samples, as_is=as_is)
    for module in model.modules():
        _ = module.training  # as its forward may do, which is not called here
    return _FOUND[key]


def _is_known(module: nn.Module) -> bool:
    return type(module).__module__.startswith(_KNOWN) and not has_hooks(module)


def _form_of(model: nn.Module) -> Hashable:
    state = State.of(model)
    modules = [
        (name, type(module), _settings(module))
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    tensors = [(names, _form(state.tensors[x])) for x, names in state.names.items()]
    return str(modules), str(tensors), torch.is_autocast_enabled("cpu")


def _settings(module: nn.Module) -> dict[str, object]:
    found = {
        name: value for name, value in vars(module).items() if not name.startswith("_")
    }
    if (config := found.get("config")) is not None:  # of transformers
        found |= {"attention": getattr(config, "_attn_implementation", None)}
    return found


def _form_of_example(example: Example) -> Hashable:
    leaves = [_form(x) if isinstance(x, Tensor) else x for x in example.leaves]
    sizes = example.batched, example.num_samples, tuple(example.open.items())
    return str(leaves), str(example.spec), sizes


def _form(x: Tensor) -> Any:
    hooks = bool(x._backward_hooks), bool(x._post_accumulate_grad_hooks)
    return x.dtype, x.shape, x.requires_grad, x.device, hooks
