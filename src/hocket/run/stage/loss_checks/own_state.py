"""Finds the weights and buffers that belong to a loss.

A loss may be a module with weights of its own (weights of tasks, centres of classes),
or reach such modules. They are trained as a part of the net's last stage.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from hocket.model.trace.reached import reached
from hocket.run.data.loss import LossFunction
from hocket.run.stage.teacher_outputs import user_loss


def loss_part(loss: LossFunction, nets: Iterable[nn.Module] = ()) -> nn.Module:
    """Return a module of all modules and parameters that belong to a loss.

    It is the loss itself if that is a module, which holds nothing of the nets.

    Args:
        loss: the user's.
        nets: the nets that are no part of it, although it may hold them.
    """
    own = user_loss(loss)
    foreign = {id(x) for net in nets for x in (*net.parameters(), *net.buffers())}
    found = reached(own)
    first = found.get("")
    if isinstance(first, nn.Module) and len(found) == 1 and _is_own(first, foreign):
        return first
    part = nn.Module()
    for path, value in found.items():
        _add(part, path.split(".") if path else [], value, foreign)
    return part


def loss_name(nets: Iterable[nn.Module], others: Iterable[str] = ()) -> str:
    """Return what comes before the names of a loss's state: `loss`, if it is free.

    Args:
        nets: the nets whose state has names beside it.
        others: names that are taken, of teachers.
    """
    taken = {name for net in nets for name, _ in net.named_children()} | {*others}
    name = "loss"
    while name in taken:
        name += "_"
    return name


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _is_own(module: nn.Module, foreign: set[int]) -> bool:
    return foreign.isdisjoint(map(id, _tensors(module)))


def _add(
    part: nn.Module, path: list[str], value: nn.Module | Tensor, foreign: set[int]
) -> None:
    """Add a module at a path; of one that holds a net, the rest of it."""
    if isinstance(value, nn.Module):
        if path and _is_own(value, foreign):
            _container(part, path[:-1])._modules[path[-1]] = value
            return
        children = value._modules.items()
        inside = {**value._parameters, **{n: x for n, x in children if x is not None}}
        for name, x in inside.items():
            if x is not None:
                _add(part, [*path, name], x, foreign)
    elif isinstance(value, nn.Parameter) and id(value) not in foreign:
        _container(part, path[:-1])._parameters[path[-1]] = value


def _container(part: nn.Module, path: list[str]) -> nn.Module:
    for key in path:
        found = part._modules.get(key)
        if found is None:
            found = part._modules[key] = nn.Module()
        part = found
    return part
