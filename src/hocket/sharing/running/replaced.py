"""A method of Python's or torch's, replaced while jobs share a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(
    home: type,
    name: str,
    replacement: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Iterator[None]:
    """Replace a method while the block runs.

    Args:
        home: the method's class.
        name: the method's name.
        replacement: given the method, returns what stands for it.
    """
    method = getattr(home, name)
    setattr(home, name, replacement(method))
    try:
        yield
    finally:
        setattr(home, name, method)
