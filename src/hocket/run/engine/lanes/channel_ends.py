"""The two ends of a channel: messages in order, behind a header, of agreed schemas.

    a channel's messages   header of step 0 │ microbatch 0 │ 1 │ 2 │ header of step 1
    announced to the       ├── shapes are known ──────────┤   └ waits for its schema
    receiver, with buffers

The schema of each shape signature is agreed once, through the store: the sender puts it
there with its first message.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import torch.distributed as dist
from torch import Tensor

from hocket.errors import WaitError
from hocket.run.comm.schema import Schema, message_tag, schema_of
from hocket.run.comm.schema_exchange import ChannelEnd, agree_on_schema, schema_key
from hocket.run.comm.step_header import (
    HEADER,
    Signature,
    StepHeader,
    check_same_header,
)
from hocket.run.comm.transport import Channel, Post, Receiver, Sender
from hocket.run.data.step_batch import Batches, NetBatches

MicrobatchKey: TypeAlias = tuple[int, int]  # the step (within a portion) and microbatch

_HEADER: Final = -1  # as microbatch and signature: what comes before all of a step
_PAUSE_S: Final = 5e-5  # while there is something to do meanwhile
_FIRST_PAUSE_S: Final = 2e-5
_LAST_PAUSE_S: Final = 1e-3

# A message that the receiver does not expect yet: step, microbatch, signature.
_Coming: TypeAlias = tuple[StepHeader, int, Signature]


class Sizing(NamedTuple):
    """How many samples a channel's messages have.

    Args:
        net: the net of the stage that makes them; its step numbers them.
        signature: returns what the shapes of a microbatch's message follow from.
    """

    net: str
    signature: Callable[[NetBatches, int], Signature]


class SharedReceivers(NamedTuple):
    """What lanes of one device hold and call while they use its receivers.

    Args:
        lock: held while a receiver is used: receivers share buffers.
        check: raises the first error of any lane, so that a wait ends early; does what
            other devices may wait for.
    """

    lock: threading.RLock
    check: Callable[[], None]


class Schemas:
    """Looks up what is agreed in the store.

    Args:
        store: the job's.
        timeout_s: after which a wait for the other end's schema ends.
    """

    def __init__(self, store: dist.Store, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._store = store
        # Equal schemas are one object, so that they are found at once.
        self._known: dict[Schema, Schema] = {}

    def agree(
        self, channel: Channel, signature: Signature, own: Schema | None
    ) -> Schema:
        """Return the schema of a signature in a channel.

        Args:
            channel: the channel.
            signature: the signature.
            own: what the sender sends; None at the receiver, which waits for it.

        Raises:
            WaitError: the sender put nothing there within the timeout.
        """
        end = ChannelEnd.RECEIVER if own is None else ChannelEnd.SENDER
        schema = agree_on_schema(
            self._store, channel, str(signature), own, end, self.timeout_s
        )
        return self._known.setdefault(schema, schema)

    def is_there(self, channel: Channel, signature: Signature) -> bool:
        """Whether the sender has put a signature's schema there."""
        return self._store.check([schema_key(channel, str(signature))])


class Outgoing:
    """A channel that this worker sends into.

    Args:
        channel: its name and ends.
        sender: its end here.
        schemas: looks up schemas.
        sizing: how many samples the messages have.
    """

    def __init__(
        self, channel: Channel, sender: Sender, schemas: Schemas, sizing: Sizing
    ) -> None:
        self._channel = channel
        self._sender = sender
        self._schemas = schemas
        self._net, self._signature = sizing
        self._agreed: dict[Signature, Schema] = {}
        # Headers that go before a step's first message, by `StepHeader.key`.
        self._headers: set[tuple[int, int]] = set()

    def begin(self, step: StepHeader) -> None:
        """Send a header before the first message of a step."""
        self._headers.add(step.key)

    def post(self) -> Post:
        """Return the place of the next message in the order of all messages."""
        return Post(self._sender, lambda: None)

    def send(
        self, batch: NetBatches, microbatch: int, values: Sequence[Tensor]
    ) -> None:
        """Copy what an op made into a message, and send it.

        Args:
            batch: the batch of each net.
            microbatch: the microbatch; 0 for a value that is one per step.
            values: the tensors.

        Raises:
            SchemaError: their shapes differ from what was agreed.
            WaitError: the receiver took nothing within the timeout.
        """
        step, signature = batch[self._net].step, self._signature(batch, microbatch)
        if self._headers and step.key in self._headers:
            self._headers.remove(step.key)
            self._sender.send(_header_tag(step), (step.header(),), HEADER)
        schema = self._agreed.get(signature)
        if schema is None:
            made = schema_of(values, keeps_order=True)
            schema = self._schemas.agree(self._channel, signature, made)
            self._agreed[signature] = schema
        tag = message_tag(schema, step.number, step.first + microbatch, step.salt)
        self._sender.send(tag, values, schema)

    def flush(self, timeout_s: float) -> None:
        """Wait until everything sent has left."""
        self._sender.flush(timeout_s)


@dataclass(eq=False)
class Incoming:
    """A channel that this worker receives from.

    Args:
        channel: its name and ends.
        receiver: its end here.
        schemas: looks up schemas.
        sizing: how many samples the messages have.
        shared: held while the receiver is used, where several lanes of this device use
            receivers; None for one lane.
        in_order: whether the transport needs an order of messages.

    Attributes:
        meanwhile: called while a message is waited for, as long as it returns True.
    """

    channel: Channel
    receiver: Receiver
    schemas: Schemas
    sizing: Sizing
    shared: SharedReceivers | None
    in_order: bool

    def __post_init__(self) -> None:
        """Begin without messages."""
        self.meanwhile: Callable[[], bool] | None = None
        self._net, self._signature = self.sizing
        self._agreed: dict[Signature, Schema] = {_HEADER: HEADER}
        self._coming: deque[_Coming] = deque()  # not expected by the receiver yet
        # The tags of those that it expects, by step and microbatch, until released.
        self._tags: dict[tuple[int, int], int] = {}
        # How many messages come before them, until received; where there is an order.
        self._numbers: dict[tuple[int, int], int] = {}
        self._num_added = 0
        self._headers: set[tuple[int, int]] = set()  # of steps that are not added yet
        self._unread: set[tuple[int, int]] = set()

    def begin(self, step: StepHeader) -> None:
        """Expect a header before the first message of a step."""
        self._headers.add(step.key)

    def expect(
        self, places: Iterable[MicrobatchKey], first: int, batches: Batches
    ) -> None:
        """Have buffers ready for a portion's messages, as far as shapes are agreed.

        Args:
            places: where they are, in the order in which they come; those of
                microbatches that a batch does not have are left out.
            first: the step that the portion's step 0 is.
            batches: the batches under way, by step and net.
        """
        for relative, microbatch in places:
            batch = batches[first + relative]
            step = batch[self._net].step
            if microbatch >= len(step.sizes):
                continue
            if self._headers and step.key in self._headers:
                self._headers.remove(step.key)
                self._unread.add(step.key)
                self._coming.append((step, _HEADER, _HEADER))
            self._coming.append((step, microbatch, self._signature(batch, microbatch)))
            if self.in_order:
                self._numbers[step.place_of(microbatch)] = self._num_added
                self._num_added += 1
        self._announce()

    def _announce(self) -> None:
        """Announce messages, in order, up to the first one of an unknown shape."""
        coming, agreed = self._coming, self._agreed
        while coming and (schema := agreed.get(coming[0][2])) is not None:
            tags = []
            while coming and agreed.get(coming[0][2]) is schema:
                step, microbatch, _ = coming.popleft()
                if microbatch == _HEADER:
                    tags.append(_header_tag(step))
                    continue
                at = step.first + microbatch
                tag = message_tag(schema, step.number, at, step.salt)
                self._tags[step.number, at] = tag
                tags.append(tag)
            self.receiver.expect(tags, schema)

    def post(self) -> Post:
        """Return the place of the next message in the order of all messages."""
        return Post(self.receiver, self._agree)

    def receive(self, batch: NetBatches, microbatch: int) -> tuple[Tensor, ...]:
        """Wait for a message; its values stay valid until `release`.

        Raises:
            WaitError: it did not come within the timeout, or the sender is gone.
            SchemaError: something else came, or the two sides' batches differ.
        """
        step = batch[self._net].step
        if self.shared is not None:
            return self._poll(self.shared, step, microbatch)
        if self.meanwhile is not None:
            while self.meanwhile() and not self._has_come(step, microbatch):
                time.sleep(_PAUSE_S)
        place = step.place_of(microbatch)
        if self.in_order:
            self.receiver.await_turn(self._numbers.pop(place))
        if self._unread and step.key in self._unread:
            self._announce_until(step, _HEADER)
            self._unread.remove(step.key)
            self._read_header(step)
        if self._coming:
            self._announce_until(step, microbatch)
        return self.receiver.receive(self._tags[place])

    def release(self, batch: NetBatches, microbatch: int) -> None:
        """Release the buffer of a message that is no longer needed."""
        tag = self._tags.pop(batch[self._net].step.place_of(microbatch))
        if self.shared is None:
            self.receiver.release(tag)
            return
        with self.shared.lock:
            self.receiver.release(tag)

    def _poll(
        self, shared: SharedReceivers, step: StepHeader, microbatch: int
    ) -> tuple[Tensor, ...]:
        """Receive without keeping other lanes, whose ops the sender may wait for."""
        timeout_s, pause_s = self.schemas.timeout_s, _FIRST_PAUSE_S
        until_s = time.monotonic() + timeout_s
        while True:
            shared.check()
            with shared.lock:
                if self._has_come(step, microbatch):
                    return self.receiver.receive(self._tags[step.place_of(microbatch)])
            if time.monotonic() >= until_s:
                channel = self.channel
                raise WaitError(
                    f"{channel}: waited {timeout_s:.1f} s for microbatch "
                    f"{microbatch} of step {step.number}; rank {channel.from_rank} is "
                    "gone, stuck, or slower than the timeout allows"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _has_come(self, step: StepHeader, microbatch: int) -> bool:
        """Whether a message can be received without a wait; reads its header."""
        if step.key in self._unread:
            if not self._is_announced(step, _HEADER):
                return False
            if not self.receiver.poll(_header_tag(step)):
                return False
            self._unread.remove(step.key)
            self._read_header(step)
        return self._is_announced(step, microbatch) and self.receiver.poll(
            self._tags[step.place_of(microbatch)]
        )

    def _is_announced(self, step: StepHeader, microbatch: int) -> bool:
        """Whether the receiver expects a message; looks up shapes that are known."""
        while self._is_coming(step, microbatch):
            if not self.schemas.is_there(self.channel, self._coming[0][2]):
                return False
            self._agree()
        return True

    def _announce_until(self, step: StepHeader, microbatch: int) -> None:
        """Look up the shapes of a message, and of those that are made before it."""
        while self._is_coming(step, microbatch):
            self._agree()

    def _is_coming(self, step: StepHeader, microbatch: int) -> bool:
        return any(x[0] is step and x[1] == microbatch for x in self._coming)

    def _agree(self) -> None:
        """Look up the shapes of the first message that is not announced yet."""
        signature = self._coming[0][2]
        self._agreed[signature] = self.schemas.agree(self.channel, signature, None)
        self._announce()

    def _read_header(self, step: StepHeader) -> None:
        tag = _header_tag(step)
        (header,) = self.receiver.receive(tag)
        ends = self.channel
        check_same_header(step.header(), ends.to_rank, header, ends.from_rank)
        self.receiver.release(tag)


class LaneChannels:
    """The channels of what a stage makes in several lanes of its device.

    Args:
        net: the stage's net.
    """

    def __init__(self, net: str) -> None:
        self._net = net
        self._of: dict[tuple[int, int], Incoming] = {}  # each message's, until released

    def expect(
        self,
        channel: Incoming,
        places: Iterable[MicrobatchKey],
        first: int,
        batches: Batches,
    ) -> None:
        """Note which channel a portion's messages use; see `Incoming.expect`."""
        for relative, microbatch in places:
            step = batches[first + relative][self._net].step
            if microbatch < len(step.sizes):
                self._of[step.place_of(microbatch)] = channel

    def receive(self, batch: NetBatches, microbatch: int) -> tuple[Tensor, ...]:
        """See `Incoming.receive`."""
        place = batch[self._net].step.place_of(microbatch)
        return self._of[place].receive(batch, microbatch)

    def release(self, batch: NetBatches, microbatch: int) -> None:
        """See `Incoming.release`."""
        place = batch[self._net].step.place_of(microbatch)
        self._of.pop(place).release(batch, microbatch)


def _header_tag(step: StepHeader) -> int:
    return message_tag(HEADER, step.number, step.first)
