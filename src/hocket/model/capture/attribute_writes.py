"""Detects and undoes attributes that a forward writes to its modules."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import CellType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from hocket.model.guards.reached import OWN, Holder, Holders

_OWN: Final = OWN | {"forward"}  # that replaces the class's
_ABSENT: Final = object()
COLLECTIONS: Final = list, dict, set, deque
# A class of its own may forbid what restoring does.
_RESTORED: Final = frozenset({*COLLECTIONS, Counter, OrderedDict, defaultdict})


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
            if not same(self._before.get(name, _ABSENT), now.get(name, _ABSENT))
        ]


def _attributes(model: nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{name}" if path else name: held(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _OWN
    }


def held(value: Any) -> Any:
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


def same(a: Any, b: Any) -> bool:
    """Return whether two values that are held have the same content."""
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


@dataclass(frozen=True, slots=True)
class Collection:
    """A collection, and its items at an earlier time.

    Args:
        name: the name of the module's attribute.
        itself: the list, dict, set or deque.
        before: its earlier items, kept alive so that no other object reuses their
            memory.
    """

    name: str
    itself: Any
    before: Sequence[Any]

    @property
    def is_changed(self) -> bool:
        """Whether it has other items now, or another order."""
        now = _items(self.itself)
        is_same = len(now) == len(self.before)
        return not (is_same and all(map(_is_same_item, now, self.before)))

    def restore(self) -> None:
        """Restore the earlier items of a plain collection."""
        if type(self.itself) not in _RESTORED or not self.is_changed:
            return
        self.itself.clear()
        if isinstance(self.itself, Counter):  # whose own update counts items
            dict.update(self.itself, self.before)
        elif isinstance(self.itself, dict | set):
            self.itself.update(self.before)
        else:
            self.itself.extend(self.before)


def collections_of(attributes: Mapping[str, Any]) -> list[Collection]:
    """Return all collections that a module's attributes are, nested ones too."""
    found: dict[int, Collection] = {}
    for name, value in attributes.items():
        for x in _inside(value, found):
            found[id(x)] = Collection(name, x, _items(x))
    return list(found.values())


def _inside(value: Any, known: dict[int, Collection]) -> Iterator[Any]:
    """Return a value and the collections in it, each before its items."""
    if isinstance(value, COLLECTIONS):
        if id(value) in known:
            return
        yield value
    elif not isinstance(value, tuple):
        return
    items = value.values() if isinstance(value, dict) else value
    for x in items:
        yield from _inside(x, known)


def _items(collection: Any) -> Sequence[Any]:
    is_dict = isinstance(collection, dict)
    return list(collection.items() if is_dict else collection)


def _is_same_item(a: Any, b: Any) -> bool:
    """Return whether two items are the same object; of a dict's pairs, both."""
    both_pairs = isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b)
    return a is b or (both_pairs and all(x is y for x, y in zip(a, b, strict=True)))


class KeptAttributes:
    """The attributes of a module at one time, hooks among them, to be restored.

    Args:
        module: the module; none of those inside it.
        without: the names of attributes that do not count.
    """

    def __init__(self, module: nn.Module, without: Container[str] = ()) -> None:
        self.module, self._without = module, without
        own = vars(module).items()
        self.attributes = {name: x for name, x in own if name not in without}
        self.collections = collections_of(self.attributes)

    def restore(self) -> None:
        """Restore them; collections in place, nested ones too; no values of tensors."""
        own = vars(self.module)
        for name in own.keys() - self.attributes.keys():
            if name not in self._without:
                del own[name]
        own.update(self.attributes)
        for collection in self.collections:
            collection.restore()


@contextmanager
def preserve_attributes(model: nn.Module) -> Iterator[None]:
    """Undo changes of modules' attributes when the block ends (`KeptAttributes`)."""
    before = [KeptAttributes(module) for module in model.modules()]
    try:
        yield
    finally:
        for kept in before:
            kept.restore()


@contextmanager
def preserve_reached(
    modules: nn.Module, value: object = None, others: object = None
) -> Iterator[None]:
    """Undo changes of modules' attributes, and of all that code reaches.

    Variables and globals that are bound again, attributes of objects and classes,
    collections, arrays, and generators of random numbers.

    Args:
        modules: as for `preserve_attributes`.
        value: a function or an object, whose code runs beside those of the modules.
        others: what may change for good what it reaches, too: of that, only numbers are
            restored, where they are bound to a name.
    """
    reached, shared, undone = Holders(), Holders(), list[Callable[[], object]]()
    reached.of_value(modules)
    reached.of_value(value)
    shared.of_value(others)
    for key, holder in reached.holders.items():
        is_shared = key in shared.holders
        undo = None if is_shared else _undo(holder)
        undone.append(undo or partial(_bind, holder, _bound(holder), is_shared))
    with preserve_attributes(modules):
        try:
            yield
        finally:
            for undo in undone:
                undo()


def _undo(holder: Holder) -> Callable[[], object] | None:
    """Return what restores a collection, an array or a generator; None of the rest."""
    match of := holder.of:
        case list() | dict() | set() | deque() if not holder.entry:
            return Collection(holder.name, of, _items(of)).restore
        case np.ndarray():
            return partial(np.copyto, of, of.copy())
        case np.random.Generator():
            return partial(setattr, of.bit_generator, "state", of.bit_generator.state)
        case torch.Generator():
            return partial(of.set_state, of.get_state())
        case random.Random():
            return partial(of.setstate, of.getstate())
    return None


def _bound(holder: Holder) -> dict[str, Any]:
    """Return what a variable, a global, an object or a class has under names."""
    value = holder.read()
    if isinstance(holder.of, CellType):
        return {"cell_contents": value}
    if holder.entry and isinstance(holder.of, dict):
        return {holder.entry: value}
    is_own = isinstance(value, Mapping) and value is not holder.of
    return dict(value) if is_own else {}


def _bind(holder: Holder, before: Mapping[str, Any], numbers_only: bool) -> None:
    """Bind names to what they had before, if they have something else now."""
    now = _bound(holder)
    for name in {**before, **now}:
        old, new = before.get(name, _ABSENT), now.get(name, _ABSENT)
        if old is new or (numbers_only and type(old) not in (int, float, complex)):
            continue
        if isinstance(holder.of, dict):
            holder.of[name] = old
        elif old is _ABSENT:
            delattr(holder.of, name)
        else:
            setattr(holder.of, name, old)
