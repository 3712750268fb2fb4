"""The layers of a model that may freeze, and where the model is cut behind them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import nn

from hocket.errors import ConfigError, ModelError
from hocket.model.capture.captured import Captured
from hocket.model.stages.cut import boundaries_from_names


def blocks_in(lists: Mapping[str, Sequence[tuple[str, int]]], total: int) -> list[str]:
    """Return the children of the block list that holds most parameters.

    Of the lists that hold more than half of the model's parameters, the innermost is
    taken, so that a model that is itself a sequence is not mistaken for its blocks. If
    it is the model, its last child is the head.

    Args:
        lists: the lists of modules, by path (the model's own is empty): paths and
            numbers of parameters of their children.
        total: the model's parameters.

    Raises:
        ConfigError: no list has two children with parameters.

    >>> lists = {"": [("stem", 1), ("body", 8), ("head", 1)],
    ...          "body": [("body.0", 4), ("body.1", 4)]}
    >>> blocks_in(lists, 10)
    ['body.0', 'body.1']
    """
    held = {
        path: sum(count for _, count in children)
        for path, children in lists.items()
        if sum(count > 0 for _, count in children) > 1
    }
    if not held:
        raise ConfigError(
            "no list of modules has two children with parameters, so there are no "
            'layers to freeze: name them, as in layers="encoder.layers.*"'
        )
    most = [path for path, count in held.items() if 2 * count > total]
    if most:
        path = min(most, key=lambda x: (held[x], -len(x)))
    else:
        path = max(held, key=lambda x: held[x])
    names = [name for name, _ in lists[path]]
    return names if path else names[:-1]


def blocks_matching(pattern: str, modules: Sequence[str]) -> list[str]:
    """Return the modules that a pattern names, in the model's order.

    Args:
        pattern: a path in which `*` stands for one name, as "encoder.layers.*".
        modules: the paths of all modules.

    Raises:
        ConfigError: it names none.

    >>> blocks_matching("body.*", ["body", "body.0", "body.0.conv", "body.1", "head"])
    ['body.0', 'body.1']
    """
    expression = re.escape(pattern).replace(r"\*", "[^.]+")
    found = [name for name in modules if re.fullmatch(expression, name)]
    if not found:
        raise ConfigError(
            f"layers={pattern!r} names no module of the model: take a path in which * "
            'stands for one name, as "encoder.layers.*"'
        )
    return found


def freezable_modules(model: nn.Module, pattern: str | None) -> tuple[str, ...]:
    """Return the modules that count as layers, in the model's order.

    Args:
        model: the uncut model.
        pattern: names them; the children of the list that holds most when not given.

    Raises:
        ConfigError: there are none.
    """
    modules = dict(model.named_modules())
    if pattern is not None:
        return tuple(blocks_matching(pattern, list(modules)))
    lists = {
        path: [
            (f"{path}.{name}" if path else name, _num_parameters(child))
            for name, child in module.named_children()
        ]
        for path, module in modules.items()
        if isinstance(module, nn.Sequential | nn.ModuleList)
    }
    return tuple(blocks_in(lists, _num_parameters(model)))


def frozen_edges(captured: Captured, modules: Sequence[str]) -> tuple[int, ...]:
    """Return, for 1, 2, ... frozen layers, the place of the first that still trains.

    Args:
        captured: the model, captured with cuts at these modules.
        modules: see `freezable_modules`.

    Raises:
        ModelError: the model cannot be cut before one of them.
        ConfigError: a weight is used by layers before and behind an edge.
    """
    edges = list(boundaries_from_names(captured, modules[1:]))
    last = [
        place
        for place, layer in enumerate(captured.layers)
        if any(name.startswith(f"{modules[-1]}.") for name in layer.parameters)
    ]
    if not last:
        raise ModelError(
            f"{modules[-1]} has no parameters, so it cannot freeze: name the layers, "
            'as in layers="encoder.layers.*"'
        )
    if last[-1] + 1 < len(captured.layers):  # else nothing would train behind it
        edges.append(last[-1] + 1)
    _refuse_ties(captured, edges)
    return tuple(edges)


def _refuse_ties(captured: Captured, edges: Sequence[int]) -> None:
    users: dict[str, list[int]] = {}
    for place, layer in enumerate(captured.layers):
        for name in layer.parameters:
            users.setdefault(name, []).append(place)
    for name, places in users.items():
        between = [edge for edge in edges if places[0] < edge <= places[-1]]
        if between:
            first, last = (captured.layers[i].name for i in (places[0], places[-1]))
            edge = captured.layers[between[0]].name
            raise ConfigError(
                f"{name} is used by {first} and by {last}, so it cannot freeze where "
                f"{edge} still trains: untie it, or name other layers with "
                'layers="encoder.layers.*"'
            )


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
