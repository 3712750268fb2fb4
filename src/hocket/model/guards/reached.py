"""Finds what a module's forward may read besides tensors: the dicts that hold it.

    class Net(nn.Module):
        def forward(self, x):
            x = self.block(x) * SCALE        a global of the function
            return x / self.config.rate      an attribute; and one of its object

Code of the user's is followed by the names that it reads; code of installed packages is
taken to stay as it is. So are tensors (who holds them watches them), and what can be
reached by `getattr` with a name that is computed.
"""

from __future__ import annotations

import dis
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from threading import local
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from hocket.model.guards.code_text import PLAIN, inner_code, is_installed, slots_of

_ASK_FOR_TYPES: Final = frozenset(
    ("isinstance", "issubclass", "type", "is_tensor", "__class__", "hasattr", "getattr")
)
# torch's own attributes: those of all modules, and those of recurrent ones, whose
# weights are in a list as well.
OWN: Final = frozenset(vars(nn.Module())) | {"_flat_weights", "_flat_weight_refs"}
_LEFT_OUT: Final = (Tensor, nn.Module, ModuleType)
_OF_GLOBALS: Final = ("LOAD_GLOBAL", "LOAD_NAME")
_MAKERS: Final = ("__init__", "__new__", "__init_subclass__")
# Whose objects have attributes that no training loop sets.
_WITHOUT_VALUES: Final = ("torch", "builtins", "functools", "_thread", "threading")
_MOST_VALUES: Final = 50_000


@dataclass(slots=True)
class Holder:
    """Something that holds values which a forward may read.

    Args:
        name: how the user reaches it: "config", "the module train"; with a dot behind.
        read: returns the live dict, list or value.
        of: what holds the values: a function's variable, an object, a collection, ...
        entry: the name of the only value, where that is a dict of globals.
        owners: the paths of the modules whose forwards may read it.
    """

    name: str
    read: Callable[[], Any]
    of: Any
    entry: str
    owners: set[str] = field(default_factory=set)


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module but for torch's own."""
    return {k: v for k, v in vars(module).items() if k not in OWN}


def reached_by(model: nn.Module) -> Holders:
    """Collect what all modules of a model reach."""
    holders = Holders(model)
    for path, module in model.named_modules():
        holders.of_module(path, module)
    return holders


class Holders:
    """Collects what modules reach; what several reach is collected once.

    Args:
        model: the modules, which may call one another's methods.

    Attributes:
        holders: by the identity of what holds the values, which is kept alive.
        iterators: the names of those that forwards may go on with, by module.
        unseen: what no guard sees that the code of a module reads, by its path.
        asking: the modules whose code may ask of what type a value is.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._names = set[str]() if model is None else names_in(model)
        used = partial(used_by_forward, others=self._names)
        # Models have many modules of one class.
        self._used_by: Callable[[type], set[str]] = cache(used)
        self.iterators: dict[str, str] = {}
        self.unseen: dict[str, str] = {}
        self.asking: set[str] = set()
        self.holders: dict[Any, Holder] = {}
        self._num_values = 0

    def of_module(self, path: str, module: nn.Module) -> dict[str, Any]:
        """Collect what a module's attributes and its class reach.

        Args:
            path: its path in the model.
            module: the module.

        Returns:
            Its attributes but for torch's own.
        """
        seen: set[int] = set()
        if not path and is_installed(type(module).__module__):  # is not looked at
            self.asking.add(path)
        own = own_attributes(module)
        used = self._used_by(type(module))
        for name, value in own.items():
            if name in used or not isinstance(value, Iterator):
                self._value(value, name, path, seen)
        self._value(type(module), "", path, seen)
        return own

    def of_value(self, value: Any) -> None:
        """Collect what a function or an object reaches; of modules, hooks do, too."""
        for module in value.modules() if isinstance(value, nn.Module) else ():
            self.of_module("", module)
            hooks = [x for name, x in vars(module).items() if name.endswith("_hooks")]
            self._value(hooks, "", "", set())
        self._value(value, "", "", set())

    def _hold(
        self, of: Any, name: str, path: str, read: Callable[[], Any], entry: str = ""
    ) -> None:
        key = (id(of), entry)
        if key not in self.holders:
            self.holders[key] = Holder(name, read, of, entry)
        self.holders[key].owners.add(path)

    def _value(self, value: Any, name: str, path: str, seen: set[int]) -> None:
        if isinstance(value, (*PLAIN, *_LEFT_OUT)) or id(value) in seen:
            return
        seen.add(id(value))
        self._num_values += 1
        if self._num_values > _MOST_VALUES:
            return
        if isinstance(value, FunctionType):
            self._function(value, name, path, seen)
        elif isinstance(value, type):
            self._class(value, path, seen)
        elif found := _contents(value):
            self._hold(value, f"{name}{found[0]}", path, found[1])
        else:
            self._object(value, name, path, seen)
        self._all(_inside(value), name, path, seen)

    def _object(self, value: Any, name: str, path: str, seen: set[int]) -> None:
        home = type(value).__module__.partition(".")[0]
        if isinstance(value, Iterator) and home in ("builtins", "itertools"):
            self.iterators[path] = name
        # Threads change a pipeline and a job meanwhile; losses and layers are callable.
        if home == "hocket" and not callable(value):
            return
        if home in _WITHOUT_VALUES and not isinstance(value, local | torch.Generator):
            return
        attributes: dict[str, Any] = getattr(value, "__dict__", {})
        slots = slots_of(value)
        if attributes or not slots:
            self._hold(value, f"{name}.", path, lambda: attributes)
        if slots:
            self._hold(value, f"{name}.", path, partial(slots_of, value), "slots")
        for key, inner in {**slots, **attributes}.items():
            self._value(inner, f"{name}.{key}", path, seen)
        self._class(type(value), path, seen)

    def _all(self, values: Iterable[Any], name: str, path: str, seen: set[int]) -> None:
        for value in [*values]:
            self._value(value, name, path, seen)

    def _class(self, kind: type, path: str, seen: set[int]) -> None:
        names = issubclass(kind, nn.Module) and self._used_by(kind)
        for base in kind.__mro__:
            if is_installed(base.__module__):
                if names and "forward" in vars(base):
                    read = partial(vars(base).get, "forward")
                    self._hold(base, f"{base.__name__}.forward", path, read)
                continue
            self._hold(base, f"{base.__name__}.", path, partial(vars, base))
            for name, value in [*vars(base).items()]:
                if name not in _MAKERS and (not names or name in names):
                    self._value(value, f"{base.__name__}.{name}", path, seen)

    def _function(
        self, function: FunctionType, name: str, path: str, seen: set[int]
    ) -> None:
        if is_installed(str(function.__globals__.get("__name__"))):
            return
        for variable, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._hold(cell, f"the variable {variable}", path, partial(_content, cell))
            self._value(_content(cell), variable, path, seen)
        self._all(function.__defaults__ or (), name, path, seen)
        self._all((function.__kwdefaults__ or {}).values(), name, path, seen)
        self._hold(function, f"{name}.", path, lambda: vars(function))
        self._hold(torch, "the global default dtype", path, torch.get_default_dtype)
        every = (function.__code__, *inner_code(function.__code__))
        steps = [x for code in every for x in dis.get_instructions(code)]
        read = dict.fromkeys(x.argval for x in steps if x.opname in _OF_GLOBALS)
        attributes = dict.fromkeys(name for code in every for name in code.co_names)
        home = function.__globals__
        if "open" in read and "open" not in home:
            self.unseen[path] = "it opens a file"
        self.asking.update(path for _ in _ASK_FOR_TYPES.intersection(attributes))
        if "is_grad_enabled" in attributes:
            self.unseen[path] = "it asks whether gradients are recorded"
        for name in read:
            if isinstance(value := home.get(name), ModuleType):
                self._module(value, attributes, path, seen)
            elif name in home:
                self._entry(home, name, f"the global {name}", path, seen)

    def _module(
        self, module: ModuleType, names: Iterable[str], path: str, seen: set[int]
    ) -> None:
        """Collect the values that a module of the user's has of some names."""
        if module is os and {"environ", "getenv"} & {*names}:
            self._value(module.environ, "the global os.environ", path, seen)
        if id(module) in seen:
            return
        seen.add(id(module))
        for name in names:
            value = vars(module).get(name)
            if isinstance(value, ModuleType):
                self._module(value, names, path, seen)
            elif name in vars(module) and is_installed(module.__name__):
                title, read = f"{module.__name__}.{name}", vars(module).get
                self._hold(
                    vars(module), f"the global {title}", path, partial(read, name), name
                )
            elif name in vars(module):
                self._entry(
                    vars(module),
                    name,
                    f"the global {module.__name__}.{name}",
                    path,
                    seen,
                )

    def _entry(
        self, home: dict[str, Any], name: str, title: str, path: str, seen: set[int]
    ) -> None:
        self._hold(home, title, path, partial(home.get, name), name)
        self._value(home[name], title, path, seen)


def names_in(model: nn.Module) -> set[str]:
    """Return all names that the forwards of a model's modules read, or may read."""
    kinds, names, found = {*map(type, model.modules())}, set[str](), {"forward"}
    while found != names:  # a method that one names may name others
        names = found
        found = names.union(*(used_by_forward(kind, names) for kind in kinds))
    return names


def used_by_forward(kind: type[nn.Module], others: Iterable[str] = ()) -> set[str]:
    """Return the names of attributes that the code of `forward` reads, or may read.

    Args:
        kind: the class.
        others: names of further methods that are called.
    """
    names, todo = set[str](), ["forward", *others]
    while todo:
        name = todo.pop()
        names.add(name)
        found = [vars(base)[name] for base in kind.__mro__ if name in vars(base)]
        for value in found:
            is_function = isinstance(value, FunctionType)
            for function in (value,) if is_function else _inside(value):
                code = getattr(function, "__code__", None)
                every = () if code is None else (code, *inner_code(code))
                todo += {x for one in every for x in one.co_names} - names
    return names


def _contents(value: Any) -> tuple[str, Callable[[], Any]] | None:
    """Return how a collection's values are named, and what reads them."""
    match value:
        case list() | dict() | set() | deque():
            return "[...]", lambda: value
        case partial():
            return "[...]", lambda: value.keywords
        case np.ndarray():
            return "", value.tobytes
        case ContextVar():
            return "", partial(value.get, None)
    return None


def _inside(value: Any) -> Iterable[Any]:
    """Return what a value is made of, besides its attributes."""
    match value:
        case MethodType():
            return (value.__func__, value.__self__)
        case partial():
            return (value.func, *value.args, *value.keywords.values())
        case staticmethod() | classmethod():
            return (value.__func__,)
        case property():
            return (value.fget,)
        case dict():
            return value.values()
        case list() | tuple() | set() | deque():
            return value
    return ()


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # its variable is not set yet
        return None
