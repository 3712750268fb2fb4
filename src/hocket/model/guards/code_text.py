"""Describes a function and all that it uses as text, to detect changes.

    def loss(output, targets):              its code and arguments;
        return scale * mine.distance(...)   the value of `scale`; and all of this
                                            for `mine.distance`

Globals are followed by the names that the code reads, and so are attributes of modules.
What installed packages contain counts by its name and the package's version. The text
is the same in every process. Where it would not be certain, there is none.
"""

from __future__ import annotations

import dis
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import cache, cached_property, partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hocket.errors import HocketError

_MOST_VALUES: Final = 50_000
PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
# Their versions are part of every key.
_KNOWN: Final = sys.stdlib_module_names | {"torch", "hocket"}
# What code reaches by these is not among its names.
_HIDING: Final = frozenset(
    {
        *("eval", "exec", "__import__", "import_module", "ops"),
        *("globals", "locals", "vars", "modules", "__dict__"),
    }
)
_ABOUT_A_CLASS: Final = frozenset(
    {
        *("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__"),
        *("__dataclass_fields__", "__dataclass_params__", "__firstlineno__"),
        *("__abstractmethods__", "_abc_impl"),
    }
)
# Attributes that are compared, by class.
_PARTS: Final[Mapping[type, tuple[str, ...]]] = {
    partial: ("func", "args", "keywords"),
    MethodType: ("__func__", "__self__"),
    BuiltinFunctionType: ("__name__", "__self__"),
    CodeType: ("co_code", "co_names", "co_varnames", "co_consts"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset"),
    cached_property: ("func",),
    Enum: ("name", "value"),
    Tensor: ("shape", "dtype", "requires_grad"),
    np.ndarray: ("shape", "dtype"),
    torch.Generator: ("device",),
    logging.Logger: ("name",),
}


class UnknownCodeError(HocketError):
    """What a function depends on cannot be listed for certain."""


def code_text(*values: object) -> str:
    """Return text that changes when the code of the values or their arguments do.

    Args:
        values: functions, modules, or what they are made of. Of tensors, shape, type
            and whether they require a gradient count.

    Raises:
        UnknownCodeError: they reach too much, or objects that nothing is known of.
    """
    walk = _Walk()
    try:
        return "; ".join(map(walk.text, values))
    except RecursionError:
        raise UnknownCodeError("it is nested too deep") from None


class _Walk:
    """One walk; an object that comes up again is `#` and its number."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._alive: list[object] = []  # so that no identity is used twice
        self._num_values = 0

    def text(self, value: Any) -> str:
        self._num_values += 1
        if self._num_values > _MOST_VALUES:
            raise UnknownCodeError("it reaches too many objects")
        if isinstance(value, PLAIN) and not isinstance(value, Enum):
            return repr(value)
        if isinstance(value, ModuleType):
            return value.__name__ + _version(value.__name__)
        if id(value) in self._numbers:
            return f"#{self._numbers[id(value)]}"
        self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return f"{name}({', '.join(map(self.text, _parts(value)))})"


def _parts(value: Any) -> Iterable[Any]:
    """Return what an object is made of."""
    if isinstance(value, type):
        return _of_class(value)
    if isinstance(value, FunctionType):
        return _of_function(value)
    items = _items(value)
    if items is not None:
        return items if type(value).__module__ == "builtins" else (type(value), *items)
    for kind, names in _PARTS.items():
        if isinstance(value, kind):
            return (type(value), *(getattr(value, name) for name in names))
    return _of_object(value)


def _items(value: Any) -> Iterable[Any] | None:
    """Return the items of a collection; None if it is none.

    Raises:
        UnknownCodeError: their order differs between processes.
    """
    match value:
        case list() | tuple():
            return value
        case dict():
            return [part for pair in value.items() for part in pair]
        case set() | frozenset():
            if not all(isinstance(x, PLAIN) for x in value):
                raise UnknownCodeError("it reads a set of objects")  # in any order
            return sorted(value, key=repr)
        case CellType():
            try:
                return [value.cell_contents]
            except ValueError:  # its variable is not set yet
                return []
    return None


def _of_class(kind: type) -> Iterator[Any]:
    yield kind.__module__ + _version(kind.__module__)
    if not is_installed(kind.__module__):
        yield kind.__bases__
        for name, value in vars(kind).items():
            if name not in _ABOUT_A_CLASS:
                yield from (name, value)


def _of_function(function: FunctionType) -> Iterator[Any]:
    """Yield a function's parts: of an installed one only closure and defaults."""
    home = str(function.__globals__.get("__name__"))
    yield home + _version(home)
    yield from (function.__closure__, function.__defaults__, function.__kwdefaults__)
    if not is_installed(home):
        yield from (function.__code__, vars(function))
        yield from _read_globals(function.__code__, function.__globals__)


def _of_object(value: Any) -> Iterator[Any]:
    """Yield the class of an object, and its attributes.

    Raises:
        UnknownCodeError: it has neither attributes nor a text that stays.
    """
    yield type(value)
    slots = slots_of(value)
    for name in sorted(slots):
        yield from (name, slots[name])
    if hasattr(value, "__dict__"):
        yield vars(value)
    elif not slots:
        if " at 0x" in repr(value):
            raise UnknownCodeError(f"it reads {value!r:.100}")
        yield repr(value)


def slots_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that are in `__slots__`, and set."""
    return {
        name: getattr(value, name)
        for kind in type(value).__mro__
        for name, slot in vars(kind).items()
        if isinstance(slot, MemberDescriptorType) and hasattr(value, name)
    }


def _read_globals(code: CodeType, known: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the names that code reads and their values.

    Raises:
        UnknownCodeError: it may read names that cannot be listed.
    """
    every = [code, *inner_code(code)]
    names = dict.fromkeys(name for part in every for name in part.co_names)
    if hiding := _HIDING.intersection(names):
        raise UnknownCodeError(f"it uses {', '.join(sorted(hiding))}")
    found = [known[name] for name in names if name in known]
    todo = [*found, *(x for part in every for x in _imported(part))]
    if "getattr" in names and any(map(_is_own_module, todo)):
        raise UnknownCodeError("it uses getattr, maybe of a module")
    modules = set[str]()
    while todo:
        value = todo.pop()
        yield value
        if not isinstance(value, ModuleType) or value.__name__ in modules:
            continue
        modules.add(value.__name__)
        if not is_installed(value.__name__):
            todo += [vars(value)[name] for name in names if name in vars(value)]


def inner_code(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of functions that are defined inside of a function."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from inner_code(constant)


def _is_own_module(value: Any) -> bool:
    return isinstance(value, ModuleType) and not is_installed(value.__name__)


def _imported(code: CodeType) -> Iterator[ModuleType | str]:
    """Yield the modules that code imports when it runs; the names of some.

    Raises:
        UnknownCodeError: one is relative; or neither installed nor imported already.
    """
    steps = [*dis.get_instructions(code)]
    for level, _, step in zip(steps, steps[1:], steps[2:], strict=False):
        if step.opname != "IMPORT_NAME":
            continue
        name = str(step.argval)
        if not level.argval and name in sys.modules:
            # `import a.b` gives code the name `a`.
            yield from (sys.modules[name], sys.modules[name.partition(".")[0]])
        elif not level.argval and is_installed(name):
            yield name + _version(name)
        else:
            raise UnknownCodeError(f"it imports {name!r} when it runs")


@cache
def is_installed(module: str) -> bool:
    """Return whether a module is of an installed package, or of Python."""
    package = module.partition(".")[0]
    if package in sys.modules:
        path = getattr(sys.modules[package], "__file__", None) or ""
    else:
        spec = find_spec(package)
        path = (spec.origin if spec is not None else None) or ""
    is_there = {"site-packages", "dist-packages"} & {*Path(path).parts}
    return package in _KNOWN or bool(is_there)


@cache
def _version(module: str) -> str:
    """Return an installed module's version, unless it is a condition anyway.

    Raises:
        UnknownCodeError: it has none.
    """
    package = module.partition(".")[0]
    if package in _KNOWN or not is_installed(module):
        return ""
    version = getattr(sys.modules.get(package), "__version__", None)
    try:
        return f" {version or metadata.version(package)}"
    except metadata.PackageNotFoundError:
        raise UnknownCodeError(f"{package} has no version") from None
