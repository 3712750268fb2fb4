"""A store wrapper that raises an error when the store does not answer in time.

torch's TCPStore waits for an answer as long as TCP waits for the other host: a quarter
of an hour after a cable was pulled, and signals are not handled meanwhile. Here a
thread calls the store, and the caller waits for the thread.

    caller ── call ──▶ queue ──▶ thread ──▶ torch's store ──▶ network
       ◀──── answer, or WaitError after `answer_s` ────
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

import torch.distributed as dist

from hocket.errors import WaitError

ANSWER_S: Final = 10.0  # a store answers within a millisecond; lost packets take longer


@dataclass(slots=True)
class _Request:
    """One request to the store that is under way.

    Args:
        ask: calls the store.
        done: set when there is an answer or an error.
        answer: what the store returned.
        error: what it raised instead.
    """

    ask: Callable[[], Any]
    done: threading.Event = field(default_factory=threading.Event)
    answer: Any = None
    error: Exception | None = None


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
        self._calls: SimpleQueue[_Request] = SimpleQueue()
        threading.Thread(
            target=_answer, args=(self._calls,), name="hocket-store", daemon=True
        ).start()

    def set(self, key: str, value: str) -> None:
        """See `torch.distributed.Store.set`."""
        self._ask(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        """See `torch.distributed.Store.get`; the key must be there."""
        answer: bytes = self._ask(self._store.get, key)
        return answer

    def add(self, key: str, value: int) -> int:
        """See `torch.distributed.Store.add`."""
        answer: int = self._ask(self._store.add, key, value)
        return answer

    def check(self, keys: list[str]) -> bool:
        """See `torch.distributed.Store.check`."""
        answer: bool = self._ask(self._store.check, keys)
        return answer

    def _ask(self, function: Callable[..., Any], *args: Any) -> Any:
        call = _Request(partial(function, *args))
        if not self._is_lost:
            self._calls.put(call)
            self._is_lost = not call.done.wait(self._answer_s)
        if self._is_lost:
            raise WaitError(
                f"the store at {self._address} did not answer for {self._answer_s:g} "
                "s: its host (where rank 0's launcher runs) is down, or the network "
                "between the hosts is"
            )
        if call.error is not None:
            raise call.error
        return call.answer


def _answer(calls: SimpleQueue[_Request]) -> None:
    """Serve one request after the other, as long as the process lives."""
    while True:
        call = calls.get()
        try:
            call.answer = call.ask()
        except Exception as error:  # the caller raises it
            call.error = error
        call.done.set()
