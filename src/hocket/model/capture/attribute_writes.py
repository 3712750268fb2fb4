"""Detects and undoes attributes that a forward writes to its modules."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor, nn

# torch's own attributes: those of all modules, those of recurrent ones, whose weights
# are in a list as well, and a forward that replaces the class's.
_OWN: Final = frozenset(vars(nn.Module())) | {
    "_flat_weights",
    "_flat_weight_refs",
    "forward",
}
_ABSENT: Final = object()
_CONTAINERS: Final = (dict, OrderedDict, defaultdict, list, set, deque)


class AttributeSnapshot:
    """The present attributes of a module and all modules inside it.

    Parameters, buffers, submodules and hooks do not count.

    Args:
        model: the outermost module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = _attributes(model)

    def changed(self) -> list[str]:
        """Return the full names of attributes with other content now."""
        now = _attributes(self._model)
        names = [*self._before, *(name for name in now if name not in self._before)]
        return [
            name
            for name in names
            if not _same(self._before.get(name, _ABSENT), now.get(name, _ABSENT))
        ]


def _attributes(model: nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{name}" if path else name: _held(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _OWN
    }


def _held(value: Any) -> Any:
    """Copy a value such that later changes of containers or tensors do not show."""
    match value:
        case Tensor():
            return value, value._version
        case Mapping():
            return [part for pair in value.items() for part in pair]
        case list() | tuple() | deque():
            return list(value)
        case Set():
            return sorted(map(id, value))
        case _:
            return value


def _same(a: Any, b: Any) -> bool:
    match a, b:
        case (Tensor() as x, int(v)), (Tensor() as y, int(w)):
            return x is y and v == w
        case list(), list():
            return len(a) == len(b) and all(map(_same_part, a, b))
        case _:
            return _same_part(a, b)


def _same_part(a: Any, b: Any) -> bool:
    plain = (int, float, complex, bool, str, bytes)
    return a is b or (isinstance(a, plain) and type(a) is type(b) and a == b)


@contextmanager
def preserve_attributes(model: nn.Module) -> Iterator[None]:
    """Undo changes of modules' attributes, hooks among them, when the block ends.

    Containers are restored in place. Values of tensors are not.
    """
    before = [
        (module, dict(vars(module)), [_contents(x) for x in vars(module).values()])
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, contents in before:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            for value, content in zip(attributes.values(), contents, strict=True):
                _put_back(value, content)


def _contents(value: Any) -> Any:
    return value.copy() if type(value) in _CONTAINERS else None


def _put_back(value: Any, content: Any) -> None:
    if content is None:
        return
    value.clear()
    if isinstance(value, list | deque):
        value.extend(content)
    else:
        value.update(content)
