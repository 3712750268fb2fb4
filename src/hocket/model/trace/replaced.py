"""Functions of Python's or torch's, replaced for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(
    home: Any, *names: str, by: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replace functions or methods while the block runs.

    Args:
        home: the module or class that has them.
        names: their names.
        by: given one of them, returns what stands for it.
    """
    own = {name: vars(home).get(name) for name in names}
    for name in names:
        setattr(home, name, by(getattr(home, name)))
    try:
        yield
    finally:
        for name, function in own.items():
            delattr(home, name)
            if function is not None:  # else it is inherited
                setattr(home, name, function)
