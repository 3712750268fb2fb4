"""Process-wide settings that are restored correctly in whatever order users end.

Two pipelines of one process each watch for signals, and may be closed in any order:

    made     a   a b                the last one made is the one in force
    closed         b   (a is gone)  ... also when an earlier one ends before it
                       the state before a
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, Final, TypeAlias, TypeVar

T = TypeVar("T")
Handler: TypeAlias = (
    Callable[[int, FrameType | None], object] | int | signal.Handlers | None
)

# The first one in force, and those that were set since.
_handlers: Final[defaultdict[int, list[Handler]]] = defaultdict(list)
_wakeups: Final[list[int]] = []
_hooks: Final[list[Callable[[Any], object]]] = []


@contextlib.contextmanager
def signal_handler(number: signal.Signals, handler: Handler) -> Iterator[None]:
    """Install a signal handler while the block runs; in the main thread only."""

    def put(new: Handler) -> Handler:
        # Python returns None for a handler set in C, and cannot put it back.
        return signal.signal(number, new) or signal.SIG_DFL

    with _put(put, handler, _handlers[number]):
        yield


def is_free(number: signal.Signals) -> bool:
    """Whether a signal has no handler, or one of `signal_handler`'s."""
    known = (signal.SIG_DFL, *_handlers[number][-1:])
    return any(signal.getsignal(number) is handler for handler in known)


@contextlib.contextmanager
def signal_wakeup(descriptor: int) -> Iterator[None]:
    """Write the number of each signal to a socket; in the main thread only."""
    put = partial(signal.set_wakeup_fd, warn_on_full_buffer=False)
    with _put(put, descriptor, _wakeups):
        yield


@contextlib.contextmanager
def unraisable_hook(see: Callable[[BaseException | None], bool]) -> Iterator[None]:
    """See the exceptions that Python ignores, as in a weak reference's callback.

    Args:
        see: returns whether it has handled the exception; others are printed as usual.
    """
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if not see(unraisable.exc_value):
            before(unraisable)

    def put(new: Callable[[sys.UnraisableHookArgs], object]) -> Any:
        old, sys.unraisablehook = sys.unraisablehook, new
        return old

    with _put(put, hook, _hooks):
        yield


@contextlib.contextmanager
def _put(put: Callable[[T], T], value: T, stack: list[T]) -> Iterator[None]:
    before = put(value)
    if not stack:
        stack.append(before)
    stack.append(value)
    try:
        yield
    finally:
        stack.remove(value)
        put(stack[-1])
        if len(stack) == 1:
            stack.clear()
