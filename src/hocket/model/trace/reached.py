"""Finds the modules and tensors that a function reaches by its Python code.

    def loss(output, targets):            `scale`, a global or a variable around it;
        return scale * self.net(output)   `self.net`, for the code names it

Of other objects than modules only what the code names is followed: a trainer whose
method is the loss may hold much that the loss does not read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Final

from torch import Tensor, nn

_MOST_ITEMS: Final = 1000
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), type)
_KNOWN: Final = sys.stdlib_module_names | {"torch", "numpy", "hocket"}


def reached(function: object) -> dict[str, nn.Module | Tensor]:
    """Return the modules and tensors, by the names on the way to them.

    Modules are not looked into. What is called is named "" if it is a module, or a
    module's method.

    Args:
        function: a function, a method, a `functools.partial`, or an object with
            `__call__`.
    """
    walk = _Walk()
    walk.visit(function, "", frozenset({"__call__"}))
    return walk.found


def read_beside(model: nn.Module) -> dict[str, list[Tensor]]:
    """Return the tensors of the model that modules reach outside of themselves.

    A reference to a module around is taken to be for something else.

    Args:
        model: the outermost module.
    """
    known = {id(x) for x in (*model.parameters(), *model.buffers())}
    found: dict[str, list[Tensor]] = {}
    for path, module in model.named_modules():
        if _is_known(type(module).__module__):
            continue
        own = {*map(id, (*module.modules(), *module.parameters(), *module.buffers()))}
        for value in reached(module.forward).values():
            tensors = [value] if isinstance(value, Tensor) else _outside(value, module)
            tensors = [x for x in tensors if id(x) in known - own]
            if tensors and id(value) not in own:
                found.setdefault(path, []).extend(tensors)
    return found


def _outside(value: nn.Module, module: nn.Module) -> list[Tensor]:
    is_around = any(x is module for x in value.modules())
    return [] if is_around else [*value.parameters(), *value.buffers()]


class _Walk:
    """One walk; each object is visited once."""

    def __init__(self) -> None:
        self.found: dict[str, nn.Module | Tensor] = {}
        self._seen: dict[int, object] = {}

    def visit(self, value: Any, path: str, names: frozenset[str]) -> None:
        """Follow a value.

        Args:
            value: what is reached.
            path: the names on the way to it.
            names: the names in the code that reads it.
        """
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        match value:
            case nn.Module() | Tensor():
                self.found[path] = value
            case partial():
                self.visit(value.func, path, names)
                self._items({**dict(_counted(value.args)), **value.keywords}, path)
            case MethodType():
                self.visit(value.__self__, path, names)
                function: Any = value.__func__
                self._function(function, path)
                self._attributes(value.__self__, path, _names(function.__code__))
            case FunctionType():
                self._function(value, path)
            case list() | tuple() | set() | frozenset() | Mapping() if (
                len(value) > _MOST_ITEMS
            ):
                return  # data
            case list() | tuple() | set() | frozenset() | Mapping():
                self._items(value, path)
            case _:
                self._attributes(value, path, names)

    def _items(self, values: Any, path: str) -> None:
        is_named = isinstance(values, Mapping)
        items = dict(values if is_named else _counted(values))
        for name, value in items.items():
            self.visit(value, _joined(path, str(name)), frozenset())

    def _function(self, function: FunctionType, path: str) -> None:
        names = _names(function.__code__)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                self.visit(cell.cell_contents, _joined(path, name), names)
            except ValueError:  # its variable is not set yet
                continue
        given = {**dict(_counted(function.__defaults__ or ()))}
        self._items({**given, **(function.__kwdefaults__ or {})}, path)
        if not _is_known(str(function.__globals__.get("__name__"))):
            for name in sorted(names & function.__globals__.keys()):
                self.visit(function.__globals__[name], _joined(path, name), names)

    def _attributes(self, value: Any, path: str, names: frozenset[str]) -> None:
        """Follow the attributes that code names, and the methods that it calls."""
        is_known = isinstance(value, ModuleType) and _is_known(value.__name__)
        own = {} if is_known else getattr(value, "__dict__", {})
        for name in sorted(names):
            kind = getattr(type(value), name, None)
            if name in own:
                self.visit(own[name], _joined(path, name), names)
            elif isinstance(kind, MemberDescriptorType):
                self.visit(getattr(value, name, None), _joined(path, name), names)
            elif isinstance(kind, FunctionType) and id(kind) not in self._seen:
                self._seen[id(kind)] = kind
                self._function(kind, path)
                self._attributes(value, path, _names(kind.__code__))


def _counted(values: Any) -> Iterator[tuple[str, Any]]:
    return ((str(i), value) for i, value in enumerate(values))


def _joined(path: str, name: str) -> str:
    name = name.replace(".", "_")
    return f"{path}.{name}" if path else name


def _names(code: CodeType) -> frozenset[str]:
    inner = (x for x in code.co_consts if isinstance(x, CodeType))
    return frozenset(code.co_names).union(*map(_names, inner))


def _is_known(module: str) -> bool:
    """Return whether a module is of an installed package, or of Python."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return module.partition(".")[0] in _KNOWN or "-packages" in file
