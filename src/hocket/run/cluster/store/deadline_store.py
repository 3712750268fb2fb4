"""A store wrapper that raises an error instead of waiting for what will not come.

torch's TCPStore waits for an answer as long as TCP waits for the other host: a quarter
of an hour after a cable was pulled, and signals are not handled meanwhile. Here a
thread calls the store, and the caller waits for the thread.

    caller ── call ──▶ queue ──▶ thread ──▶ torch's store ──▶ network
       ◀──── answer, or WaitError after `answer_s` ────

A worker that ends by a signal or an error says so under one key. A worker that
polls for a missing key raises then, instead of waiting for one that is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from typing import Any, Final, TypeVar

import torch.distributed as dist

from hocket.background import BackgroundCalls
from hocket.errors import WaitError

_LEFT: Final = "left"  # the key; its value says which worker has ended, and why
_LEAVE_S: Final = 1.0
ANSWER_S: Final = 10.0  # a store answers within a millisecond; lost packets take longer


R = TypeVar("R")


class DeadlineStore(dist.Store):
    """Wraps a store and raises WaitError when it does not answer in time.

    Hold a reference while it is used: a PrefixStore on top of it holds none.

    Args:
        store: the wrapped store; call it only through this wrapper.
        address: the store's address, for the error.
        answer_s: how long to wait for an answer; after a timeout no further request is
            sent.
    """

    def __init__(
        self, store: dist.Store, address: str, answer_s: float = ANSWER_S
    ) -> None:
        super().__init__()
        self._store = store
        self._address = address
        self._answer_s = answer_s
        self._is_lost = False
        self._calls = BackgroundCalls("hocket-store")

    def set(self, key: str, value: str) -> None:
        """See `torch.distributed.Store.set`."""
        self._ask(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        """See `torch.distributed.Store.get`; the key must be there."""
        return self._ask(self._store.get, key)

    def add(self, key: str, value: int) -> int:
        """See `torch.distributed.Store.add`."""
        return self._ask(self._store.add, key, value)

    def check(self, keys: list[str]) -> bool:
        """See `torch.distributed.Store.check`.

        Raises:
            WaitError: a key is missing, and a worker has left the job.
        """
        if self._ask(self._store.check, keys):
            return True
        if self._ask(self._store.check, [_LEFT]):
            raise WaitError(f"left alone: {self.get(_LEFT).decode()}")
        return False

    def leave(self, why: str) -> None:
        """Let the checks of all workers raise; without effect if the store is lost.

        Args:
            why: which worker leaves, and what has ended it.
        """
        answer = self._calls.submit(partial(self._store.set, _LEFT, why))
        wait([answer], min(_LEAVE_S, self._answer_s))

    def _ask(self, function: Callable[..., R], *args: Any) -> R:
        if not self._is_lost:
            answer = self._calls.submit(partial(function, *args))
            if wait([answer], self._answer_s).done:
                return answer.result()
            self._is_lost = True
        raise WaitError(
            f"the store at {self._address} did not answer for {self._answer_s:g} "
            "s: its host (where rank 0's launcher runs) is down, or the network "
            "between the hosts is"
        )
