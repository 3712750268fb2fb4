"""Keep parameters in a stage under the paths that they have in the uncut model.

    stage                          a plain container for each module on the way
      transformer                  (or the module itself, if it is run as it is)
        h
          3
            ln_1   weight, bias    the uncut model's own Parameter objects

A tied parameter is kept under all its names, the first one first, so that
`named_parameters()` calls it in every stage as the uncut model does, and `state_dict()`
has every name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hocket.model.trace.state import State

# The dict that a module keeps a tensor in, and the tensor's key there.
Home = tuple[dict[str, Any], str]


def give_homes(
    stage: nn.Module,
    state: State,
    names: frozenset[str],
    modules: Mapping[str, nn.Module],
) -> dict[str, Home]:
    """Put parameters, buffers and modules into a stage.

    Args:
        stage: a stage without parameters yet.
        state: the uncut model's state.
        names: the first names of the stage's parameters and buffers.
        modules: the modules that it runs as they are, by path.

    Returns:
        Each tensor's home, by its first name.
    """
    homes: dict[str, Home] = {}
    for name, first in state.first_name.items():
        if first in names:  # in this order, for the first name of a tied one is first
            whole = (x for x in modules if not x or name.startswith(f"{x}."))
            if (path := next(whole, None)) is not None:
                _put_module(stage, path, modules[path])
            homes.setdefault(first, _put_tensor(stage, state, name))
    for path, module in modules.items():
        _put_module(stage, path, module)
    return homes


def take_tensors(stage: nn.Module, path: str, state: State) -> None:
    """Let a stage's module that others call, too, have tensors that were sent here."""
    for name, first in state.first_name.items():
        if name.startswith(f"{path}.") and not state.tensors[first].is_meta:
            owner_path, _, key = name.rpartition(".")
            owner = stage.get_submodule(owner_path)
            own: Any = owner._parameters if key in owner._parameters else owner._buffers
            own[key] = state.tensors[first]


def _put_tensor(stage: nn.Module, state: State, name: str) -> Home:
    path, _, key = name.rpartition(".")
    container = _container(stage, path)
    first = state.first_name[name]
    # Straight into the dicts: a model may call its parts `index` or `type`, and a
    # registration would refuse a name that a module has an attribute of.
    if state.is_parameter(first):
        kept: dict[str, Any] = container._parameters
    else:
        kept = container._buffers
        if name not in state.persistent:
            container._non_persistent_buffers_set.add(key)
    kept[key] = state.tensors[first]
    return kept, key


def _put_module(stage: nn.Module, path: str, module: nn.Module) -> None:
    if not path:  # the whole model: the stage has the very same dicts
        for own in ("_parameters", "_buffers", "_modules"):
            vars(stage)[own] = vars(module)[own]
        stage._non_persistent_buffers_set = module._non_persistent_buffers_set
        vars(stage)["whole"] = (module,)
        return
    parent, _, key = path.rpartition(".")
    _container(stage, parent)._modules[key] = module


def _container(stage: nn.Module, path: str) -> nn.Module:
    module = stage
    for key in filter(None, path.split(".")):
        child = module._modules.get(key)
        if child is None:
            child = module._modules[key] = nn.Module()
        module = child
    return module
