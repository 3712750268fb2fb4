"""Messages that are as long on their way as one wants, between workers of one host.

    sender     ── op ──┤ send: the time, and what is sent │── next op ──
                        └────────── delay_s ──────────┐
    receiver   ── op ──┤ receive: there already, but   ▼ read not before this │── op ──

The sender is not kept busy, and messages on one channel do not wait for each other: it
is the latency of a link (`hocket.core.costs.Link`), and not its bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor

from hocket.run.comm.schema import Schema, TensorSpec
from hocket.run.comm.transport import Channel, Receiver, Sender, Transport
from hocket.run.comm.transports import make_transport
from hocket.run.engine import worker_context
from tests.run.device.support.emulated import sleep_until

_STAMP: Final = TensorSpec((1,), "float64")  # when it was sent, by `perf_counter`


class DelayedSender(Sender):
    """Sends the time with each message; see `Sender`.

    Args:
        inner: carries it.
    """

    def __init__(self, inner: Sender) -> None:
        self._inner = inner
        self._stamp = torch.zeros(_STAMP.shape, dtype=torch.float64)
        self._schemas: dict[Schema, Schema] = {}

    def send(self, tag: int, tensors: Sequence[Tensor], schema: Schema) -> None:
        """See `Sender.send`."""
        self._stamp[0] = perf_counter()
        stamped = _stamped(schema, self._schemas)
        self._inner.send(tag, (*tensors, self._stamp), stamped)

    def flush(self, timeout_s: float) -> None:
        """See `Sender.flush`."""
        self._inner.flush(timeout_s)

    def close(self) -> None:
        """See `Sender.close`."""
        self._inner.close()


class DelayedReceiver(Receiver):
    """Gives no message out before its time; see `Receiver`.

    Args:
        inner: receives it.
        delay_s: after it was sent.
    """

    def __init__(self, inner: Receiver, delay_s: float) -> None:
        self._inner = inner
        self._delay_s = delay_s
        self._schemas: dict[Schema, Schema] = {}

    def expect(self, tags: Sequence[int], schema: Schema) -> None:
        """See `Receiver.expect`."""
        self._inner.expect(tags, _stamped(schema, self._schemas))

    def ready(self, tag: int) -> bool:
        """See `Receiver.ready`; when it was sent is known only when it is received."""
        return False

    def receive(self, tag: int) -> tuple[Tensor, ...]:
        """See `Receiver.receive`."""
        *tensors, stamp = self._inner.receive(tag)
        sleep_until(float(stamp) + self._delay_s)
        return tuple(tensors)

    def release(self, tag: int) -> None:
        """See `Receiver.release`."""
        self._inner.release(tag)

    def close(self) -> None:
        """See `Receiver.close`."""
        self._inner.close()


class DelayedTransport(Transport):
    """Another transport's channels, with a delay; see `Transport`.

    Args:
        inner: carries the messages.
        delay_s: from sending to being read, at least.
    """

    def __init__(self, inner: Transport, delay_s: float) -> None:
        self._inner = inner
        self._delay_s = delay_s

    def sender(self, channel: Channel) -> Sender:
        """See `Transport.sender`."""
        return DelayedSender(self._inner.sender(channel))

    def receiver(self, channel: Channel) -> Receiver:
        """See `Transport.receiver`."""
        return DelayedReceiver(self._inner.receiver(channel), self._delay_s)

    def trim(self) -> None:
        """See `Transport.trim`."""
        self._inner.trim()

    def close(self) -> None:
        """See `Transport.close`."""
        self._inner.close()


@contextmanager
def delayed_messages(delay_s: float) -> Iterator[None]:
    """Pipelines that are made inside have messages that take so long.

    On every worker. Without a delay messages are what they are.
    """
    if delay_s == 0:
        yield
        return

    def make_delayed(*args: Any, **kwargs: Any) -> Transport:
        return DelayedTransport(make_transport(*args, **kwargs), delay_s)

    with patch.object(worker_context, "make_transport", make_delayed):
        yield


def _stamped(schema: Schema, known: dict[Schema, Schema]) -> Schema:
    """With room for the time; made once for each schema, as it is hashed."""
    if schema not in known:
        known[schema] = Schema((*schema.tensors, _STAMP))
    return known[schema]
