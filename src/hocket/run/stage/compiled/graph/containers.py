"""Finds changes in the lists, dicts and sets that modules keep."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

COLLECTIONS: Final = list, dict, set, deque


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
        return not (is_same and all(map(_is_same, now, self.before)))

    def restore(self) -> None:
        """Restore the earlier items."""
        if not self.is_changed:
            return
        self.itself.clear()
        if isinstance(self.itself, dict | set):
            self.itself.update(self.before)
        else:
            self.itself.extend(self.before)


def collections_of(module: nn.Module) -> list[Collection]:
    """Return all collections that a module keeps, nested ones too."""
    found: dict[int, Collection] = {}
    for name, value in vars(module).items():
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


def _is_same(a: Any, b: Any) -> bool:
    """Return whether two items are the same object; of a dict's pairs, both."""
    both_pairs = isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b)
    return a is b or (both_pairs and all(x is y for x, y in zip(a, b, strict=True)))
