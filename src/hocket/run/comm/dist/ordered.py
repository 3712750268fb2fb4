"""Messages between GPUs, posted in an order that all ranks have planned.

    planned      [>F 0]   [>F 1  <B 0]   [<B 1] ...     core/plans/message_order.py
    send(F 0)    posted
    send(F 1)             posted, with the receive
    receive(B 0)                           ...          the stream waits, not the host
    receive(B 1)                         posted

NCCL pairs messages by their order alone, and each may hold up what the device is given
after it. So a message is posted when the lane comes to its place: a send at once, a
receive when its value is needed, or before the next send that stands behind it.

Headers, and messages on channels without a place in the order, go by way of the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import Final

import torch
from torch import Tensor

from hocket.run.cluster.device_waits import DeviceWaits, Posted
from hocket.run.cluster.store.poll import poll
from hocket.run.comm.buffers import Buffer, Pool
from hocket.run.comm.dist.pair_wires import PairWires, WireMessage
from hocket.run.comm.schema import Schema
from hocket.run.comm.step_header import HEADER
from hocket.run.comm.transport import (
    NUM_BUFFERS,
    Carries,
    Channel,
    Post,
    Receiver,
    Sender,
    Transport,
    check_tensors,
    ignore_wait,
)
from hocket.run.diagnostics.flight_recorder import OnWait

_CLOSE_S: Final = 1.0  # for the last messages to leave; a peer may be gone


@dataclass(slots=True)
class _Message:
    """A message in a buffer; posted once it has an operation."""

    tag: int
    buffer: Buffer
    work: Posted | None = None


@dataclass(eq=False)
class _Links:
    """What the ends of a transport share: the order, the wires, the waits.

    Args:
        wires: move messages.
        device: the tensors' device.
        timeout_s: how long the device may wait for a message.
        on_wait: called before each wait.
        num_buffers: how many messages of a channel may be on their way.
    """

    wires: PairWires
    device: InitVar[torch.device]
    timeout_s: InitVar[float]
    on_wait: OnWait
    num_buffers: int

    def __post_init__(self, device: torch.device, timeout_s: float) -> None:
        """Begin without messages."""
        wires = self.wires
        self.waits = DeviceWaits(timeout_s, wires.abort, wires.record_event)
        self.sent = Pool(device)
        self.received = Pool(device)
        self.order: deque[Sequence[Post]] = deque()  # groups; an empty one is a mark
        self.num_unposted = 0  # messages to send that are not posted

    def wait(self, channel: Channel, peer: int, message: _Message) -> None:
        """Let the current stream wait for a message; the host goes on.

        Raises:
            WaitError: an earlier message took too long.
        """
        assert message.work is not None, "it was posted"
        self.on_wait(channel.name, peer)
        what = f"{channel.message(message.tag)}, with rank {peer}"
        self.waits.wait(message.work, what)

    def post_sends(self) -> None:
        """Post the packed messages, and everything planned before them."""
        while self.num_unposted and self._may_post():
            self.post_next()

    def post_next(self) -> None:
        """Post the messages at the next place of the order."""
        assert self._may_post(), "sends stand behind the ops that make their values"
        group = self.order.popleft()
        if not group:
            return  # a mark before an R or U; see `Transport.plan`
        ends = [_as_end(post) for post in group]
        for post, end in zip(group, ends, strict=True):
            if not end.may_transfer:
                post.agree()
        transfers = [end.next_transfer() for end in ends]
        work = self.wires.post(ends[0].peer, transfers)
        for end in ends:
            end.note_posted(work)

    def is_next(self, end: Receiver) -> bool:
        """Return whether a receiver's message is at the next place of the order."""
        return any(post.end is end for post in self.order[0])

    def _may_post(self) -> bool:
        return all(_as_end(post).may_post for post in self.order[0])


class OrderedSender(Sender):
    """Packs messages and posts them at their places; see `Sender`.

    Args:
        channel: the channel.
        headers: sends headers by way of the host.
        links: what all ends share.
    """

    def __init__(self, channel: Channel, headers: Sender, links: _Links) -> None:
        self.peer = channel.to_rank
        self._channel = channel
        self._headers = headers
        self._links = links
        self._unposted: deque[_Message] = deque()
        self._posted: deque[_Message] = deque()

    def send(self, tag: int, tensors: Sequence[Tensor], schema: Schema) -> None:
        """See `Sender.send`."""
        if schema == HEADER:
            self._headers.send(tag, tensors, schema)
            return
        check_tensors(self._channel, tag, tensors, schema)
        self._links.waits.check()
        self._release_sent(self._links.num_buffers - 1)
        buffer = self._links.sent.take(schema)
        for place, tensor in zip(buffer.views, tensors, strict=True):
            place.copy_(tensor.detach())
        self._unposted.append(_Message(tag, buffer))
        self._links.num_unposted += 1
        self._links.post_sends()

    def flush(self, timeout_s: float) -> None:
        """See `Sender.flush`. The stream waits; `Transport.close` waits for the end."""
        self._headers.flush(timeout_s)
        self._release_sent(0)

    def close(self) -> None:
        """See `Sender.close`."""
        self._unposted.clear()
        self._posted.clear()

    @property
    def may_post(self) -> bool:
        """Whether the next message is there."""
        return bool(self._unposted)

    may_transfer = may_post

    @property
    def is_done(self) -> bool:
        """Whether all messages have left."""
        return not self._unposted and all(_has_ended(x) for x in self._posted)

    def next_transfer(self) -> WireMessage:
        """Return the next message, to be posted."""
        self._links.num_unposted -= 1
        self._posted.append(self._unposted.popleft())
        return WireMessage(self._posted[-1].buffer.flat, sends=True)

    def note_posted(self, work: Posted) -> None:
        """Keep the operation of the message that was posted."""
        self._posted[-1].work = work

    def _release_sent(self, most: int) -> None:
        """Release buffers of sent messages; wait until at most `most` are left."""
        while self._posted and (
            len(self._posted) > most or _has_ended(self._posted[0])
        ):
            message = self._posted[0]
            if not _has_ended(message):
                self._links.wait(self._channel, self.peer, message)
            self._posted.popleft()
            self._links.sent.release(message.buffer)


class OrderedReceiver(Receiver):
    """Posts receives at their places; see `Receiver`.

    Args:
        channel: the channel.
        headers: receives headers by way of the host.
        links: what all ends share.
    """

    may_post: Final = True  # a receive always may

    def __init__(self, channel: Channel, headers: Receiver, links: _Links) -> None:
        self.peer = channel.from_rank
        self._channel = channel
        self._headers = headers
        self._links = links
        self._header_tags: set[int] = set()
        self._expected: deque[tuple[int, Schema]] = deque()
        self._posted: dict[int, _Message] = {}
        self._newest: _Message | None = None
        self._num_posted = 0
        self._held: dict[int, Buffer] = {}

    def expect(self, tags: Sequence[int], schema: Schema) -> None:
        """See `Receiver.expect`."""
        if schema == HEADER:
            self._header_tags.update(tags)
            self._headers.expect(tags, schema)
            return
        self._expected.extend((tag, schema) for tag in tags)
        self._links.received.expect(schema, len(tags))

    def ready(self, tag: int) -> bool:
        """See `Receiver.ready`; no `receive` of a device's tensors blocks the host."""
        if tag in self._header_tags:
            return self._headers.ready(tag)
        return tag in self._posted

    def await_turn(self, number: int) -> None:
        """See `Receiver.await_turn`."""
        while self._num_posted <= number and not (
            self._num_posted == number and self._links.is_next(self)
        ):
            self._links.post_next()

    def receive(self, tag: int) -> tuple[Tensor, ...]:
        """See `Receiver.receive`. The current stream waits for the message."""
        if tag in self._header_tags:
            return self._headers.receive(tag)
        self._links.waits.check()
        while tag not in self._posted:
            assert self._links.order, "the order holds all expected messages"
            self._links.post_next()
        message = self._posted.pop(tag)
        self._links.wait(self._channel, self.peer, message)
        self._held[tag] = message.buffer
        return message.buffer.tensors()

    def release(self, tag: int) -> None:
        """See `Receiver.release`."""
        if tag in self._header_tags:
            self._header_tags.remove(tag)
            self._headers.release(tag)
            return
        self._links.received.release(self._held.pop(tag))

    def close(self) -> None:
        """See `Receiver.close`."""
        self._expected.clear()
        self._posted.clear()

    @property
    def may_transfer(self) -> bool:
        """Whether it is known what the next message holds."""
        return bool(self._expected)

    @property
    def is_done(self) -> bool:
        """Whether all messages that were posted have come."""
        return all(_has_ended(message) for message in self._posted.values())

    def next_transfer(self) -> WireMessage:
        """Return a buffer for the next message, to be posted."""
        tag, schema = self._expected.popleft()
        self._num_posted += 1
        buffer = self._links.received.take(schema)
        self._newest = self._posted[tag] = _Message(tag, buffer)
        return WireMessage(self._newest.buffer.flat, sends=False)

    def note_posted(self, work: Posted) -> None:
        """Keep the operation of the message that was posted."""
        assert self._newest is not None
        self._newest.work = work


class OrderedTransport(Transport):
    """Posts messages in the order of `plan`; see above.

    Args:
        host: carries headers, and channels without a place in the order.
        wires: carry the others.
        device: the tensors' device.
        timeout_s: how long the device may wait for a message.
        num_buffers: how many messages of a channel may be on their way.
        on_wait: called before each wait.
    """

    needs_order = True

    def __init__(
        self,
        host: Transport,
        wires: PairWires,
        *,
        device: torch.device,
        timeout_s: float,
        num_buffers: int = NUM_BUFFERS,
        on_wait: OnWait = ignore_wait,
    ) -> None:
        self._host = host
        self._wires = wires
        self._links = _Links(wires, device, timeout_s, on_wait, num_buffers)
        self._ends: list[OrderedSender | OrderedReceiver] = []
        self._is_closed = False

    def sender(self, channel: Channel) -> Sender:
        """See `Transport.sender`."""
        if channel.carries is not Carries.PLANNED:
            return self._host.sender(channel)
        headers = self._host.sender(_headers_of(channel))
        sender = OrderedSender(channel, headers, self._links)
        self._ends.append(sender)
        return sender

    def receiver(self, channel: Channel) -> Receiver:
        """See `Transport.receiver`."""
        if channel.carries is not Carries.PLANNED:
            return self._host.receiver(channel)
        headers = self._host.receiver(_headers_of(channel))
        receiver = OrderedReceiver(channel, headers, self._links)
        self._ends.append(receiver)
        return receiver

    def plan(self, groups: Sequence[Sequence[Post]]) -> None:
        """See `Transport.plan`."""
        self._links.order.extend(groups)

    def post_planned(self, *, rest: bool = False) -> None:
        """See `Transport.post_planned`."""
        order = self._links.order
        while order and (order[0] or rest):
            self._links.post_next()
        if order:
            order.popleft()

    def trim(self) -> None:
        """See `Transport.trim`."""
        self._host.trim()
        self._links.sent.trim()
        self._links.received.trim()

    def close(self) -> None:
        """See `Transport.close`. What has not ended by then is aborted."""
        if self._is_closed:
            return
        self._is_closed = True
        waits = self._links.waits
        is_clean = not self._links.order and poll(
            lambda: waits.all_in_time and all(end.is_done for end in self._ends),
            _CLOSE_S,
        )
        self._wires.close(failed=not is_clean)
        for end in self._ends:
            end.close()
        self._host.close()


def _headers_of(channel: Channel) -> Channel:
    name = f"headers of {channel.name}"
    return Channel(name, channel.from_rank, channel.to_rank, Carries.HOST)


def _has_ended(message: _Message) -> bool:
    return message.work is not None and message.work.is_completed()


def _as_end(post: Post) -> OrderedSender | OrderedReceiver:
    end = post.end
    assert isinstance(end, OrderedSender | OrderedReceiver), "a planned channel's"
    return end
