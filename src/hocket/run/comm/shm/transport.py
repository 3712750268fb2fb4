"""Messages between processes of one host, through memory that both map.

    sender                          shared slots                      receiver
    send: copy the tensors ──────▶ [ 2 │ 3 │ · │ 1 ] ──────▶ receive: copy to a buffer
          post "3 in slot 1" ═════════ link ═══════════════▶          of its own, and
          wait if no slot is    ◀═════ link ═══════════════           post "taken"
          free

Both copies together take a few microseconds for small messages, and run at a memcpy's
speed for big ones (bench/transport). Reading messages where they lie would save the
second: 20 µs for 512 KiB, nothing beside what a stage computes on them. For that, the
values of a tensor released too early would change without autograd's notice.

The first message of every schema is announced: with the schema's text, so that a
receiver that expects another can name both, and with larger slots if it needs them.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from hocket.errors import RunError
from hocket.run.comm.buffers import Pool
from hocket.run.comm.shm.receiver import SharedMemoryReceiver
from hocket.run.comm.shm.sender import SharedMemorySender
from hocket.run.comm.transport import (
    NUM_BUFFERS,
    Channel,
    Receiver,
    Sender,
    Transport,
    ignore_wait,
)
from hocket.run.diagnostics.flight_recorder import OnWait


class SharedMemoryTransport(Transport):
    """Carries messages of CPU tensors between processes of one host and one user.

    Args:
        store: where receivers write their addresses; with a prefix of its own for every
            transport, since old addresses lead nowhere.
        timeout_s: how long a wait may take.
        num_buffers: how many messages the sender of a channel may be ahead; the
            receiver's number counts.
        num_uncredited: see `SharedMemoryReceiver`; less than `num_buffers`.
        on_wait: called before each wait.
    """

    def __init__(
        self,
        store: Store,
        *,
        timeout_s: float,
        num_buffers: int = NUM_BUFFERS,
        num_uncredited: int = 0,
        on_wait: OnWait = ignore_wait,
    ) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._num_buffers = num_buffers
        self._num_uncredited = num_uncredited
        self._on_wait = on_wait
        self._ends: list[Sender | Receiver] = []
        self._pool = Pool(torch.device("cpu"))

    def sender(self, channel: Channel) -> Sender:
        """See `Transport.sender`; connects at the first message."""
        sender = SharedMemorySender(
            channel, self._store, timeout_s=self._timeout_s, on_wait=self._on_wait
        )
        self._ends.append(sender)
        return sender

    def receiver(self, channel: Channel) -> Receiver:
        """See `Transport.receiver`; starts to listen."""
        receiver = SharedMemoryReceiver(
            channel,
            self._store,
            timeout_s=self._timeout_s,
            num_buffers=self._num_buffers,
            num_uncredited=self._num_uncredited,
            pool=self._pool,
            on_wait=self._on_wait,
        )
        self._ends.append(receiver)
        return receiver

    def trim(self) -> None:
        """See `Transport.trim`."""
        self._pool.trim()

    def close(self) -> None:
        """See `Transport.close`."""
        for end in self._ends:
            end.close()


def memory_domain() -> str:
    """Return a text that is equal in two processes if they can share memory.

    Raises:
        RunError: this system has no memory to share in the way that is needed.
    """
    if not hasattr(os, "memfd_create"):
        raise RunError("sharing memory between workers needs Linux; use gloo instead")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Socket names belong to a network namespace, process ids to a pid namespace.
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
    return " ".join([boot, *spaces, str(os.getuid())])
