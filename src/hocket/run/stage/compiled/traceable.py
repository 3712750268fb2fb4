"""Refuses modules whose code may not be fixed in a graph.

A graph does again what the code did once. Modules that are run as they are may do
something else each time: they may draw Python's random numbers, change their own
attributes, or have hooks.
"""

from __future__ import annotations

import gc
import pickle
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from torch import Tensor, nn

from hocket.model.capture.attribute_writes import COLLECTIONS, KeptAttributes
from hocket.model.capture.sequential import has_hooks
from hocket.run.stage.compiled.capture import CannotCompileError

_VALUES: Final = bool, int, float, str


class DrawnNumbersError(CannotCompileError):
    """Numbers were drawn meanwhile: by a module, or beside it by a compiler."""


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
    before = [KeptAttributes(module) for module in modules]
    states = [(x, _state_of(x)) for x in _generators()]
    try:
        try:
            yield
        except Exception:
            _check(before)  # may be why
            raise
        _check(before)
        if any(_state_of(x) != state for x, state in states):
            raise DrawnNumbersError(
                "its modules draw random numbers that are not torch's"
            )
    finally:
        for kept in before:
            kept.restore()
        for x, state in states:
            x.__setstate__(pickle.loads(state))


def _generators() -> list[Any]:
    """Return all random generators of Python and NumPy in this process.

    But those of names: of temporary files and of multiprocessing's semaphores, which
    other threads draw, such as those of a compiler.
    """
    kinds = random.Random, np.random.RandomState, np.random.BitGenerator
    every = [*gc.get_objects(), random._inst, np.random.mtrand._rand]
    sequence = tempfile._RandomNameSequence  # type: ignore[attr-defined]
    names = {id(vars(x).get("_rng")) for x in every if type(x) is sequence}
    found = [x for x in every if issubclass(type(x), kinds) and id(x) not in names]
    return [x for x in found if not isinstance(x, random.SystemRandom)]


def _state_of(generator: Any) -> bytes:
    return pickle.dumps(generator.__getstate__())


def _compared(attributes: Mapping[str, Any]) -> dict[str, Any]:
    kinds = *_VALUES, Tensor, tuple, *COLLECTIONS
    return {name: x for name, x in attributes.items() if isinstance(x, kinds)}


def _check(before: Sequence[KeptAttributes]) -> None:
    for kept in before:
        old, new = _compared(kept.attributes), _compared(vars(kept.module))
        names = old.keys() | new.keys()
        changed = {x for x in names if not _is_same(old.get(x), new.get(x))}
        changed |= {x.name for x in kept.collections if x.is_changed}
        if changed:
            raise CannotCompileError(
                f"its {_kind(kept.module)} changes its own attribute {min(changed)!r}"
            )


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    are_values = isinstance(a, _VALUES) and isinstance(b, _VALUES)
    return a is b or (are_values and a == b)


def _kind(module: nn.Module) -> str:
    return type(module).__name__
