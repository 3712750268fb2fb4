"""Messages of a device's tensors by way of the host, as for two workers on one GPU.

    device    op makes it ─▶ copy ┐                            ┌ copy ─▶ op reads it
    host                          └▶ a thread waits for the    │ pinned memory
                                     copy, then sends ═══▶ receive waits

NCCL refuses two ranks on one GPU, and gloo carries no tensors of a GPU from one rank to
another. The inner transport lets a sender be `num_buffers` messages ahead; as many more
may wait for their copy or for the thread. The sender's lane continues at once. The
receiver's lane launches no op until the message has arrived, because the host cannot
signal a stream that waits for it.
"""

from __future__ import annotations

from typing import Final

import torch

from hocket.run.comm.buffers import Pool
from hocket.run.comm.staged.receiver import StagedReceiver, Staging
from hocket.run.comm.staged.sender import StagedSender
from hocket.run.comm.transport import (
    Carries,
    Channel,
    Receiver,
    Sender,
    Transport,
)
from hocket.run.device.copies import Copies

_CLOSE_S: Final = 1.0  # for a thread that is sending; a peer may be gone


class StagedTransport(Transport):
    """Carries a device's tensors over a transport of the host's tensors.

    Args:
        inner: sends and receives tensors in host memory.
        copies: copies tensors between the device and the host.
        num_buffers: how many messages of a channel may wait to be copied or sent.
        timeout_s: how long a wait may take.
    """

    def __init__(
        self, inner: Transport, copies: Copies, *, num_buffers: int, timeout_s: float
    ) -> None:
        self._inner = inner
        self._copies = copies
        self._num_buffers = num_buffers
        self._timeout_s = timeout_s
        self._staging = Staging(copies)
        self._pool = Pool(torch.device("cpu"), pins=copies.pins)
        self._senders: list[StagedSender] = []

    def sender(self, channel: Channel) -> Sender:
        """See `Transport.sender`."""
        if channel.carries is Carries.HOST:
            return self._inner.sender(channel)
        sender = StagedSender(
            channel,
            self._inner.sender(channel),
            self._copies,
            self._pool,
            num_buffers=self._num_buffers,
            timeout_s=self._timeout_s,
        )
        self._senders.append(sender)
        return sender

    def receiver(self, channel: Channel) -> Receiver:
        """See `Transport.receiver`."""
        if channel.carries is Carries.HOST:
            return self._inner.receiver(channel)
        return StagedReceiver(self._inner.receiver(channel), self._staging)

    def trim(self) -> None:
        """See `Transport.trim`."""
        self._inner.trim()
        self._staging.trim()
        self._pool.trim()

    def close(self) -> None:
        """See `Transport.close`."""
        for sender in self._senders:
            sender.close()
        for sender in self._senders:
            sender.join(_CLOSE_S)
        self._inner.close()
