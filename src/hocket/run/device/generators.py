"""One lane at a time holds torch's default generators, and restores their states.

torch has one default generator for each device, which all threads and streams share.
While a lane draws (dropout), a draw of another lane would change the numbers of both.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch


class GeneratorLock:
    """A reentrant lock that can be asked whether it is free."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder = 0  # a thread's identifier; no thread has 0
        self._num_acquired = 0

    def is_free_for(self, thread: int) -> bool:
        """Return whether the thread with this identifier would get it at once."""
        return self._holder in {0, thread}

    def acquire(self, timeout_s: float) -> bool:
        """Wait for the lock; return whether it was acquired within the time."""
        if not self._lock.acquire(timeout=timeout_s):
            return False
        self._holder = threading.get_ident()
        self._num_acquired += 1
        return True

    def release(self) -> None:
        """Undo one `acquire` of the same thread."""
        self._num_acquired -= 1
        if self._num_acquired == 0:
            self._holder = 0
        self._lock.release()


@cache
def generator_lock(device: torch.device) -> GeneratorLock:
    """Return the process's lock of a device's default generator."""
    return GeneratorLock()


@contextmanager
def seeded(generators: Sequence[torch.Generator], seed: int) -> Iterator[None]:
    """Seed generators while the block runs; restore their states afterwards."""
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
