"""A CPU in the place of a GPU: copies to the host end some time after the call.

What is not there yet is not a number. The memory of a copy to the device must stay as
it is until the copy has ended, too.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

_POISON: Final = 0xFF  # in every byte: not a number, and -1


class DelayedEvent:
    """See `CopyEvent`."""

    def __init__(self) -> None:
        self._is_passed = threading.Event()

    def query(self) -> bool:
        """See `CopyEvent.query`."""
        return self._is_passed.is_set()

    def synchronize(self) -> None:
        """See `CopyEvent.synchronize`."""
        assert self._is_passed.wait(10.0)

    def wait(self) -> None:
        """See `CopyEvent.wait`. The next copies come behind it in any case."""

    def end(self) -> None:
        """Let it be passed."""
        self._is_passed.set()


class DelayedCopies:
    """See `Copies`: one stream, which is some time behind.

    Args:
        delay_s: how long each copy takes.

    Attributes:
        faults: copies to the device whose memory was changed too early.
    """

    pins = False

    def __init__(self, delay_s: float) -> None:
        self.device = torch.device("cpu")
        self.faults = 0
        self._delay_s = delay_s
        self._changed = threading.Condition()
        self._queue: deque[tuple[Callable[[], None], DelayedEvent]] = deque()
        threading.Thread(target=self._serve, daemon=True).start()

    def to_host(
        self, into: Sequence[Tensor], tensors: Sequence[Tensor]
    ) -> DelayedEvent:
        """See `Copies.to_host`."""
        # A stream reads what is there now, though the op behind it changes that.
        values = [tensor.detach().clone() for tensor in tensors]
        for place in into:
            _poison(place)
        return self._submit(lambda: _copy(into, values))

    def to_device(
        self, into: Sequence[Tensor], tensors: Sequence[Tensor]
    ) -> DelayedEvent:
        """See `Copies.to_device`. Ops read it at once here."""
        _copy(into, tensors)
        values = [tensor.clone() for tensor in tensors]

        def check() -> None:
            same = map(torch.equal, values, tensors)
            self.faults += not all(same)

        return self._submit(check)

    def record_event(self) -> DelayedEvent:
        """See `Copies.record_event`."""
        return self._submit(lambda: None)

    def _submit(self, work: Callable[[], None]) -> DelayedEvent:
        event = DelayedEvent()
        with self._changed:
            self._queue.append((work, event))
            self._changed.notify_all()
        return event

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                work, event = self._queue.popleft()
            time.sleep(self._delay_s)
            work()
            event.end()


def _copy(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for place, tensor in zip(into, tensors, strict=True):
        place.copy_(tensor)


def _poison(place: Tensor) -> None:
    place.reshape(-1).view(torch.uint8).fill_(_POISON)
