"""Sends and receives single messages through torch.distributed, with their errors.

All channels of a job share one gloo group, in which messages are paired by number. The
31 bits that gloo has for one are

    channel (10) | message on the channel (10) | tag mod 2039 (11)

which no two messages in flight share. The last part makes a disagreement about step,
microbatch or schema a wait that ends, not a wrong message.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch.distributed as dist
from torch import Tensor

from hocket.errors import WaitError
from hocket.run.comm.transport import Channel
from hocket.run.diagnostics.flight_recorder import OnWait

MAX_CHANNELS: Final = 1 << 10
_MAX_ON_THEIR_WAY: Final = 1 << 10
_CHECK: Final = 2039  # the largest prime below 2 ** 11


def wire_number(channel: int, message: int, tag: int) -> int:
    """Return the number under which gloo pairs a message.

    Args:
        channel: the channel's number, below 1024.
        message: how many messages the channel carried before.
        tag: the message's tag (`message_tag`).
    """
    order = channel * _MAX_ON_THEIR_WAY + message % _MAX_ON_THEIR_WAY
    return order << _CHECK.bit_length() | tag % _CHECK


@dataclass(frozen=True, slots=True)
class Wire:
    """One end of a channel in a process group.

    Args:
        group: the group of both ends; None for the job's.
        timeout_s: how long a wait may take.
        on_wait: called before each wait.
        channel: the channel.
        peer: the rank at the other end.
    """

    group: dist.ProcessGroup | None
    timeout_s: float
    on_wait: OnWait
    channel: Channel
    peer: int

    def start(
        self,
        transfer: Callable[..., dist.Work | None],
        flat: Tensor,
        number: int,
        tag: int,
    ) -> dist.Work:
        """Start to send or receive a message.

        Args:
            transfer: `dist.isend` or `dist.irecv`.
            flat: the message's bytes.
            number: the number under which both ends pair it.
            tag: the message's tag.
        """
        try:
            work = transfer(flat, self.peer, group=self.group, tag=number)
        except RuntimeError as error:
            raise self._lost(tag, 0.0, error) from error
        assert work is not None, "this rank is a member of the group"
        return work

    def wait(self, work: dist.Work, tag: int, timeout_s: float) -> None:
        """Wait until a message has left or arrived.

        Args:
            work: the operation to wait for.
            tag: the message's tag.
            timeout_s: how long to wait.

        Raises:
            WaitError: the time is up, or the other end is gone.
        """
        self.on_wait(self.channel.name, self.peer)
        begin_s = time.monotonic()
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            waited_s = time.monotonic() - begin_s
            raise self._lost(tag, waited_s, error) from error

    def _lost(self, tag: int, waited_s: float, error: RuntimeError) -> WaitError:
        """Translate an error of the backend."""
        message = self.channel.message(tag)
        reason = str(error).strip().split("\n", 1)[0]
        if "imed out" in reason:
            return WaitError(
                f"{message}: waited {waited_s:.1f} s for rank {self.peer}: it is "
                "stopped, stuck, slower than the timeout allows, or its messages are "
                f"others than those expected here ({reason})"
            )
        return WaitError(
            f"{message}: rank {self.peer} is gone after a wait of {waited_s:.1f} s "
            f"({reason})"
        )


class BackgroundWait:
    """Waits for a message in a thread of its own, for a caller that must not block.

    A message of gloo can be waited for once: afterwards only `end` may be called.

    Args:
        wire: the end of the channel.
        work: the operation to wait for.
        tag: the message's tag.
    """

    def __init__(self, wire: Wire, work: dist.Work, tag: int) -> None:
        self._error: WaitError | None = None
        self._thread = threading.Thread(
            target=self._wait, args=(wire, work, tag), daemon=True
        )
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the message has come, or will not."""
        return not self._thread.is_alive()

    def end(self) -> None:
        """Wait for the thread.

        Raises:
            WaitError: the time was up, or the other end is gone.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _wait(self, wire: Wire, work: dist.Work, tag: int) -> None:
        try:
            wire.wait(work, tag, wire.timeout_s)
        except WaitError as error:
            self._error = error
