"""Messages of a device's tensors by way of the host, as for two workers on one GPU.

    device    op makes it ─▶ copy ┐                            ┌ copy ─▶ op reads it
    host                          └▶ a thread waits for the    │ pinned memory
                                     copy, then sends ═══▶ receive waits

NCCL refuses two ranks on one GPU, and gloo carries no tensors of a GPU from one rank to
another. A sender may be ahead by what the inner transport allows, and by as many
messages more, whose copies the thread waits for or sends. The lane of the sender goes
on at once. That of the receiver is given nothing until the message is there, since a
host's message cannot end the wait of a stream.
"""

from __future__ import annotations

import torch

from hocket.run.comm.buffers import Pool
from hocket.run.comm.staged.copies import Copies
from hocket.run.comm.staged.receiver import StagedReceiver, Staging
from hocket.run.comm.staged.sender import StagedSender
from hocket.run.comm.transport import Channel, Receiver, Sender, Transport


class StagedTransport(Transport):
    """Carries a device's tensors over a transport of the host's tensors.

    Args:
        inner: carries the host's copies.
        copies: the device's copies.
        num_buffers: the most messages of a channel that wait for their copy.
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
        self._inner.close()
