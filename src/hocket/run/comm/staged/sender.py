"""The sending end of a staged channel; transport.py has the picture."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from hocket.errors import WaitError
from hocket.run.comm.buffers import Buffer, Pool
from hocket.run.comm.schema import Schema
from hocket.run.comm.transport import Channel, Sender, check_tensors
from hocket.run.device.copies import Copies, CopyEvent

log = logging.getLogger(__name__)

_PAUSE_S: Final = 50e-6  # between two looks at a copy
_LONGER_S: Final = 1.0  # added to the timeout: the inner sender's error says more


@dataclass(frozen=True, slots=True)
class _Pending:
    """A message whose copy to the host was started.

    Args:
        tag: its tag.
        buffer: its memory on the host.
        event: the copy has ended.
        until_s: by then the copy must have ended, on the monotonic clock.
    """

    tag: int
    buffer: Buffer
    event: CopyEvent
    until_s: float


class StagedSender(Sender):
    """Copies messages to the host; a thread sends them when they are there.

    Args:
        channel: the channel that it sends on.
        inner: sends tensors in host memory; only the thread uses it while messages
            wait, and closes it.
        copies: copies tensors between the device and the host.
        pool: the worker's host memory.
        num_buffers: how many messages may wait to be copied or sent.
        timeout_s: how long a wait may take.
    """

    def __init__(
        self,
        channel: Channel,
        inner: Sender,
        copies: Copies,
        pool: Pool,
        *,
        num_buffers: int,
        timeout_s: float,
    ) -> None:
        self._channel = channel
        self._inner = inner
        self._copies = copies
        self._pool = pool
        self._num_buffers = num_buffers
        self._timeout_s = timeout_s
        self._changed = threading.Condition()  # guards all below
        self._waiting: deque[_Pending] = deque()  # the first one may be being sent
        self._sent: list[Buffer] = []
        self._error: Exception | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def send(self, tag: int, tensors: Sequence[Tensor], schema: Schema) -> None:
        """See `Sender.send`. An error of an earlier message is raised here."""
        check_tensors(self._channel, tag, tensors, schema)
        self._wait_until_left(self._num_buffers - 1, self._timeout_s + _LONGER_S)
        buffer = self._pool.take(schema)
        event = self._copies.to_host(buffer.views, tensors)
        until_s = time.monotonic() + self._timeout_s
        with self._changed:
            self._waiting.append(_Pending(tag, buffer, event, until_s))
            self._changed.notify_all()
        if self._thread is None:
            name = f"hocket sends {self._channel.name}"
            self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
            self._thread.start()

    def flush(self, timeout_s: float) -> None:
        """See `Sender.flush`."""
        begin_s = time.monotonic()
        self._wait_until_left(0, timeout_s)
        self._inner.flush(max(0.001, timeout_s - (time.monotonic() - begin_s)))

    def close(self) -> None:
        """See `Sender.close`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is None:
            self._inner.close()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread of a closed sender."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _wait_until_left(self, most: int, timeout_s: float) -> None:
        """Wait until at most `most` messages are unsent; release buffers of sent ones.

        Raises:
            WaitError: they did not leave in time, or the receiver is gone.
            SchemaError: the receiver expected other messages.
        """
        with self._changed:
            in_time = self._changed.wait_for(
                lambda: len(self._waiting) <= most or self._error is not None, timeout_s
            )
            sent, self._sent = self._sent, []
            if self._error is not None:
                raise self._error
        for buffer in sent:
            self._pool.release(buffer)
        if not in_time:
            raise WaitError(
                f"{self._channel}: {len(self._waiting)} messages did not leave within "
                f"{timeout_s:.1f} s: {self._copies.device} did not compute or copy "
                f"them, or rank {self._channel.to_rank} takes none"
            )

    def _serve(self) -> None:
        """Send the messages in their order, until the channel is closed or fails."""
        try:
            while (pending := self._next()) is not None:
                buffer = pending.buffer
                self._inner.send(pending.tag, buffer.views, buffer.schema)
                with self._changed:
                    self._sent.append(self._waiting.popleft().buffer)
                    self._changed.notify_all()
        except Exception as error:  # raised where the channel is used next
            log.debug("%s: a message was not sent", self._channel, exc_info=True)
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed)  # close() ends it
            self._inner.close()

    def _next(self) -> _Pending | None:
        """Wait for the next message and its copy; None if the channel is closed."""
        with self._changed:
            # No timeout: the next message, or close(), ends it.
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if self._is_closed:
                return None
            pending = self._waiting[0]
        while not pending.event.query():
            if self._is_closed:
                return None
            if time.monotonic() >= pending.until_s:
                raise WaitError(
                    f"{self._channel.message(pending.tag)}: {self._copies.device} did "
                    f"not compute and copy it within {self._timeout_s:.1f} s: an op is "
                    "stuck, or slower than the timeout allows"
                )
            time.sleep(_PAUSE_S)
        return pending
