"""Which modules of a model count as layers that may freeze.

    stem
    encoder.layers       holds most parameters: its children count
      .0  .1  .2  .3
    norm
    head                 never freezes

What comes before the first layer freezes with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hocket.errors import ConfigError


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
