"""Refuses modules whose code may not be fixed in a graph.

A graph does again what the code did once. Modules that are run as they are may do
something else each time: they may draw Python's random numbers, change their own
attributes, or have hooks.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from torch import Tensor, nn

from hocket.model.capture.attribute_writes import preserve_attributes
from hocket.model.capture.sequential import has_hooks
from hocket.run.stage.compiled.capture import CannotCompileError

_VALUES: Final = bool, int, float, str
_COLLECTIONS: Final = list, dict, set, deque


@contextmanager
def check_traceable(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Watch modules while they run, and undo changes of their attributes.

    Args:
        modules: all modules that run, nested ones too.

    Raises:
        CannotCompileError: a module does not do the same each time.
    """
    for module in modules:
        if has_hooks(module):
            raise CannotCompileError(f"its {_kind(module)} has hooks")
    before = [
        (module, _attributes_of(module), _collections_of(module)) for module in modules
    ]
    python, numpy = random.getstate(), np.random.get_state()
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(preserve_attributes(module))
        try:
            try:
                yield
            except Exception:
                _check(before)  # may be why
                raise
            _check(before)
            if random.getstate() != python or _differ(np.random.get_state(), numpy):
                raise CannotCompileError(
                    "its modules draw random numbers that are not torch's"
                )
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            for collection in (x for *_, found in before for x in found):
                collection.restore()


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    kinds = *_VALUES, Tensor, tuple, *_COLLECTIONS
    return {name: x for name, x in vars(module).items() if isinstance(x, kinds)}


def _check(
    before: Sequence[tuple[nn.Module, dict[str, Any], Sequence[_Collection]]],
) -> None:
    for module, old, collections in before:
        new = _attributes_of(module)
        names = old.keys() | new.keys()
        changed = {x for x in names if not _is_same(old.get(x), new.get(x))}
        changed |= {x.name for x in collections if x.is_changed}
        if changed:
            raise CannotCompileError(
                f"its {_kind(module)} changes its own attribute {min(changed)!r}"
            )


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    are_values = isinstance(a, _VALUES) and isinstance(b, _VALUES)
    return a is b or (are_values and a == b)


def _differ(a: Any, b: Any) -> bool:
    return a[2] != b[2] or not np.array_equal(a[1], b[1])


def _kind(module: nn.Module) -> str:
    return type(module).__name__


@dataclass(frozen=True, slots=True)
class _Collection:
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
        """Restore the earlier items."""
        if not self.is_changed:
            return
        self.itself.clear()
        if isinstance(self.itself, dict | set):
            self.itself.update(self.before)
        else:
            self.itself.extend(self.before)


def _collections_of(module: nn.Module) -> list[_Collection]:
    """Return all collections that a module keeps, nested ones too."""
    found: dict[int, _Collection] = {}
    for name, value in vars(module).items():
        for x in _inside(value, found):
            found[id(x)] = _Collection(name, x, _items(x))
    return list(found.values())


def _inside(value: Any, known: dict[int, _Collection]) -> Iterator[Any]:
    """Return a value and the collections in it, each before its items."""
    if isinstance(value, _COLLECTIONS):
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
