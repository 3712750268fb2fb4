"""Messages between two workers: the interface of every transport.

    worker of stage 0                            worker of stage 1
    Sender ── send(tag) ──▶ [ at most num_buffers ] ──▶ Receiver
                             not yet received            expect(tags)  in send's order
                                                         receive(tag)  in any order
                                                         release(tag)

A channel has one direction, one sender and one receiver. Its messages keep their order.
The sender may be `num_buffers` messages ahead; then it waits. Every wait ends within a
deadline, or earlier when the other process ends. After an error a channel is of no more
use. Senders and receivers are used by one thread at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Final

from torch import Tensor

from hocket.errors import SchemaError
from hocket.run.comm.schema import Schema, schema_of, tag_text

NUM_BUFFERS: Final = 4  # by default, how many messages a sender may be ahead


class Carries(Enum):
    """Which tensors a channel carries."""

    PLANNED = "the device's, at places in an order that all ranks have planned"
    DEVICE = "the device's, at any time"
    HOST = "the host's"


@dataclass(frozen=True, slots=True)
class Channel:
    """One direction between two workers.

    Args:
        name: `F0>1` for outputs of stage 0 on their way to stage 1, `B1>0` for their
            gradients on the way back.
        from_rank: the sender's rank in the job.
        to_rank: the receiver's.
        carries: which tensors.
    """

    name: str
    from_rank: int
    to_rank: int
    carries: Carries = Carries.DEVICE

    def __str__(self) -> str:
        return f"{self.name} (rank {self.from_rank} to rank {self.to_rank})"

    @property
    def key(self) -> str:
        """A name that no other channel of the job has, in any replica."""
        return f"{self.name}@{self.from_rank}-{self.to_rank}"

    def message(self, tag: int) -> str:
        """Name one message of this channel, for errors."""
        return f"{self}, {tag_text(tag)}"


class Sender(ABC):
    """The sending end of a channel."""

    @abstractmethod
    def send(self, tag: int, tensors: Sequence[Tensor], schema: Schema) -> None:
        """Copy the tensors into a message and send it.

        The message holds what the tensors held when `send` was called: the caller may
        change or drop them at once.

        Args:
            tag: `message_tag`; no two messages that the receiver expects at a time may
                have the same.
            tensors: any strides; gradients are not recorded.
            schema: the tensors' schema.

        Raises:
            SchemaError: the tensors are not what the schema says.
            WaitError: the receiver took no message for too long, or is gone.
        """

    @abstractmethod
    def flush(self, timeout_s: float) -> None:
        """Return when this process may end without losing messages.

        Raises:
            WaitError: it took longer than `timeout_s`, or the receiver is gone.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything, without waiting. Idempotent."""


class Receiver(ABC):
    """The receiving end of a channel."""

    @abstractmethod
    def expect(self, tags: Sequence[int], schema: Schema) -> None:
        """Announce which messages come next, in the order in which they are sent."""

    @abstractmethod
    def ready(self, tag: int) -> bool:
        """Return whether `receive(tag)` would return at once, as far as is known here.

        False may also mean that the transport cannot know without waiting.
        """

    def poll(self, tag: int) -> bool:
        """Return whether `receive(tag)` would return, or raise, at once.

        For a caller that needs the message and must not block: a transport that cannot
        know without waiting begins to wait in the background.
        """
        return self.ready(tag)

    def await_turn(self, number: int) -> None:
        """Post what must be posted before one of this channel's messages.

        Call it before waiting on the host for anything that the message needs.

        Args:
            number: how many messages were expected before it, headers not counted.
        """
        assert number >= 0

    @abstractmethod
    def receive(self, tag: int) -> tuple[Tensor, ...]:
        """Wait for one of the expected messages; they may be received in any order.

        Returns:
            Its tensors, without gradients. They are the caller's until `release(tag)`;
            a backward that still needs one of them later raises autograd's error
            about variables modified in place.

        Raises:
            SchemaError: the sender sent something else than was expected.
            WaitError: nothing came for too long, or the sender is gone.
        """

    @abstractmethod
    def release(self, tag: int) -> None:
        """Release a received message's memory for reuse."""

    @abstractmethod
    def close(self) -> None:
        """Release everything, without waiting. Idempotent.

        Tensors that were received stay valid.
        """


@dataclass(frozen=True, slots=True)
class Post:
    """The place of a message in the order in which a rank posts its messages.

    Args:
        end: sends or receives its channel's next message.
        agree: makes the receiver expect that message, if it does not yet; waits for
            what the sender says of it.
    """

    end: Sender | Receiver
    agree: Callable[[], None]


class Transport(ABC):
    """Makes this process's ends of channels.

    Attributes:
        needs_order: whether messages on `PLANNED` channels need places in an order.
    """

    needs_order: ClassVar[bool] = False

    def plan(self, groups: Sequence[Sequence[Post]]) -> None:
        """Add places for messages of `PLANNED` channels, behind those added before.

        Args:
            groups: messages that are posted together, with one peer; both ends of a
                pair of ranks have the same groups in the same order. An empty one is a
                mark, for `post_planned`.
        """
        assert not self.needs_order, "such a transport keeps the order"

    def post_planned(self, *, rest: bool = False) -> None:
        """Post the receives that were planned before the next mark, or all.

        Call it before the host waits for other ranks.

        Args:
            rest: whether to post all.
        """
        assert not self.needs_order, "such a transport keeps the order"

    @abstractmethod
    def sender(self, channel: Channel) -> Sender:
        """Return the sending end of a channel from this rank; made once per channel."""

    @abstractmethod
    def receiver(self, channel: Channel) -> Receiver:
        """Return the receiving end of a channel to this rank; made once per channel."""

    @abstractmethod
    def trim(self) -> None:
        """Release memory that holds no message now."""

    @abstractmethod
    def close(self) -> None:
        """Close every end that was made, and the groups made for them. Idempotent."""


def ignore_wait(what: str, rank: int) -> None:
    """Do nothing: an `OnWait` for callers without a recorder."""


def check_tensors(
    channel: Channel, tag: int, tensors: Sequence[Tensor], schema: Schema
) -> None:
    """Raise SchemaError unless the tensors are what the schema says."""
    if not schema.holds(tensors):
        raise SchemaError(
            f"{channel.message(tag)}: rank {channel.from_rank} promised {schema} and "
            f"would send {schema_of(tensors)}"
        )
