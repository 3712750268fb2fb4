"""One end of a shared-memory channel waits for the other until a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hocket.errors import WaitError
from hocket.run.comm.shm.link import SocketLink
from hocket.run.comm.transport import Channel
from hocket.run.diagnostics.flight_recorder import OnWait


@dataclass(frozen=True, slots=True)
class Deadline:
    """Waits for a peer until a deadline, with errors that name it.

    Args:
        channel: the channel that is waited on.
        other: the rank that is waited for.
        timeout_s: how long a wait may take.
        on_wait: called before each wait.
    """

    channel: Channel
    other: int
    timeout_s: float
    on_wait: OnWait

    def wait(
        self, link: SocketLink, done: Callable[[], bool], tag: int, fault: str
    ) -> None:
        """Wait for the other end.

        Args:
            link: the connection to the other end.
            done: fetches packets and returns whether the wait is over.
            tag: the tag of the message that is waited for.
            fault: the other rank's failure, beginning with a verb, for errors.

        Raises:
            WaitError: the time is up, or the other end is gone.
        """
        if done():
            return
        self.notify_wait()
        begin_s = time.monotonic()
        while not done():
            waited_s = time.monotonic() - begin_s
            if link.peer_gone:
                raise WaitError(
                    f"{self.channel.message(tag)}: {self.peer_gone(link)} and {fault}"
                )
            if waited_s >= self.timeout_s:
                raise WaitError(
                    f"{self.channel.message(tag)}: waited {waited_s:.1f} s; rank "
                    f"{self.other} (process {link.pid}) lives but {fault}: it is "
                    "stopped, stuck, or slower than the timeout allows"
                )
            link.wait(self.timeout_s - waited_s)

    def notify_wait(self) -> None:
        """Call `on_wait`."""
        self.on_wait(self.channel.name, self.other)

    def peer_gone(self, link: SocketLink) -> str:
        """Describe that the other end is gone."""
        return (
            f"rank {self.other} is gone (its process {link.pid} ended, or closed the "
            "channel)"
        )
