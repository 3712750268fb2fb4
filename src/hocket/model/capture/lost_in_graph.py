"""Notes what modules do that calls in a graph do not.

    if random.random() < self.rate:     drawn once for ever, in a graph
        y.register_hook(self.log)       never called
    self.last = y.detach()              never set again

The innermost module that was running does it, so it has to run as it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from torch import Tensor

_HOOKS: Final = ("register_hook", "retain_grad", "register_post_accumulate_grad_hook")


def numbers_state() -> tuple[Any, ...]:
    """Return the state of the generators of Python and NumPy, that can be compared."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (name, np.asarray(keys).tobytes(), *rest)


def restore_numbers(state: tuple[Any, ...]) -> None:
    """Restore the state of the generators of Python and NumPy."""
    random.setstate(state[0])
    name, keys, *rest = state[1]
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))


@contextmanager
def preserve_numbers() -> Iterator[None]:
    """Restore the generators of Python and NumPy when the block ends."""
    state = numbers_state()
    try:
        yield
    finally:
        restore_numbers(state)


@contextmanager
def hooks_noted(note: Callable[[], None]) -> Iterator[None]:
    """Call a function whenever a hook is put on a tensor, while the block runs."""
    own = {name: vars(Tensor).get(name) for name in _HOOKS}

    def noting(hook: Callable[..., Any]) -> Callable[..., Any]:
        def noted(tensor: Tensor, *args: Any) -> Any:
            note()
            return hook(tensor, *args)

        return noted

    for name in _HOOKS:
        setattr(Tensor, name, noting(getattr(Tensor, name)))
    try:
        yield
    finally:
        for name, hook in own.items():
            if hook is None:
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, hook)
