"""Channels of one layout of the workers, over a transport that outlives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from hocket.run.comm.transport import Channel, Post, Receiver, Sender, Transport

_End = TypeVar("_End", Sender, Receiver)


class RenamedTransport(Transport):
    """Puts a text before the names of channels, and closes only its own ends.

    Args:
        transport: carries the messages; it stays open.
        prefix: another one for each layout.
    """

    def __init__(self, transport: Transport, prefix: str) -> None:
        self.needs_order = transport.needs_order  # type: ignore[misc]
        self._transport = transport
        self._prefix = prefix
        self._ends: list[Sender | Receiver] = []

    def plan(self, groups: Sequence[Sequence[Post]]) -> None:
        """See `Transport.plan`."""
        self._transport.plan(groups)

    def post_planned(self, *, rest: bool = False) -> None:
        """See `Transport.post_planned`."""
        self._transport.post_planned(rest=rest)

    def sender(self, channel: Channel) -> Sender:
        """See `Transport.sender`."""
        return self._kept(self._transport.sender(self._renamed(channel)))

    def receiver(self, channel: Channel) -> Receiver:
        """See `Transport.receiver`."""
        return self._kept(self._transport.receiver(self._renamed(channel)))

    def trim(self) -> None:
        """See `Transport.trim`."""
        self._transport.trim()

    def close(self) -> None:
        """Close the ends that were made here."""
        while self._ends:
            self._ends.pop().close()

    def _renamed(self, channel: Channel) -> Channel:
        return replace(channel, name=f"{self._prefix}{channel.name}")

    def _kept(self, end: _End) -> _End:
        self._ends.append(end)
        return end
