"""Sums one tensor over all workers, without making any worker wait when it posts.

    replica 0    0 ◀──▶ 1 ◀──▶ 2      each sends its numbers to all of its replica
                 │      │      │
    replica 1    ▼      ▼      ▼      and the sum to its copies in other replicas
                 0      1      2

`post` sends this worker's numbers and returns at once; `wait` returns when the others
have posted too.

On CPUs this goes through the transport that carries the messages: in shared memory it
takes a fifth of gloo's all-reduce. On GPUs it is one collective operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final, Protocol

from torch import Tensor

from hocket.run.cluster.group import GroupWork, WorkerGroup
from hocket.run.cluster.layout import Layout
from hocket.run.comm.schema import Schema, message_tag, schema_of
from hocket.run.comm.transport import Channel, Receiver, Sender, Transport

_WHAT: Final = "norms of the gradients"


class AllSum(Protocol):
    """Sums a tensor over all workers, once per step: `post`, then `wait`.

    Attributes:
        allows_any_order: whether workers may post several such sums in different
            orders.
    """

    allows_any_order: bool

    def post(self, own: Tensor, step: int) -> None:
        """Send this worker's numbers without waiting; every worker must call this.

        Only the numbers of the first replica count; the other replicas post zeros.

        Args:
            own: a tensor of one length on all workers and in all steps; `wait` replaces
                its numbers by the sum.
            step: the step, the same on each worker.
        """

    def wait(self) -> None:
        """Replace the posted numbers by the sum.

        Raises:
            WaitError: another worker did not post.
        """


class MessageAllSum:
    """Sums by messages between each two workers of the first replica, all its shards.

    Args:
        layout: the ranks by device and replica.
        transport: connects all workers.
        what: names the channels, which must differ from other sums'.
        devices: the devices that take part; all when not given.
    """

    allows_any_order = True

    def __init__(
        self,
        layout: Layout,
        transport: Transport,
        what: str = _WHAT,
        devices: Sequence[int] | None = None,
    ) -> None:
        own = layout.rank
        size = layout.num_shards  # those of the first replica have numbers, too
        numbers = devices or range(layout.num_devices)
        every = [x.ranks_of(d)[:size] for d in numbers for x in layout.every]
        first, *copies = layout.ranks_of(layout.device)[layout.shard :: size]
        # In one order on all workers, so that each rounds alike; None is this one.
        self._peers_in: list[Receiver | None] = []
        self._peers_out: list[Sender] = []
        self._copies_out: list[Sender] = []
        self._original_in: list[Receiver] = []  # of another replica: from the first one
        self._schema: Schema | None = None
        self._posted: tuple[Tensor, int] | None = None
        if own != first:
            self._original_in.append(transport.receiver(Channel(what, first, own)))
            return
        for peer in chain(*every):
            # Both ends of a channel are made in one order on all workers.
            for source, target in sorted({(own, peer), (peer, own)} - {(own, own)}):
                channel = Channel(what, source, target)
                if source == own:
                    self._peers_out.append(transport.sender(channel))
                else:
                    self._peers_in.append(transport.receiver(channel))
            if peer == own:
                self._peers_in.append(None)
        for copy in copies:
            self._copies_out.append(transport.sender(Channel(what, own, copy)))

    def post(self, own: Tensor, step: int) -> None:
        """See `AllSum.post`."""
        if self._schema is None:
            self._schema = schema_of((own,))
        tag = message_tag(self._schema, step, 0)
        self._posted = own, tag
        for receiver in filter(None, (*self._peers_in, *self._original_in)):
            receiver.expect([tag], self._schema)
        _send(self._peers_out, tag, own, self._schema)

    def wait(self) -> None:
        """See `AllSum.wait`."""
        assert self._posted is not None
        assert self._schema is not None
        own, tag = self._posted
        self._posted = None
        mine = own.clone()
        if self._peers_in:
            own.zero_()
        for peer in self._peers_in:
            own += mine if peer is None else _received(peer, tag)
            if peer is not None:
                peer.release(tag)
        for receiver in self._original_in:
            own.copy_(_received(receiver, tag))
            receiver.release(tag)
        _send(self._copies_out, tag, own, self._schema)


class GroupAllSum:
    """Sums by one all-reduce.

    Like all code for NCCL, it has not been run on several GPUs.

    Args:
        group: all workers.
    """

    allows_any_order = False  # NCCL needs one order of operations

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._work: GroupWork | None = None

    def post(self, own: Tensor, step: int) -> None:
        """See `AllSum.post`."""
        self._work = self._group.all_reduce(own, f"{_WHAT} of step {step}")

    def wait(self) -> None:
        """See `AllSum.wait`."""
        assert self._work is not None
        self._group.wait(self._work, _WHAT)
        self._work = None


def _send(senders: Sequence[Sender], tag: int, numbers: Tensor, schema: Schema) -> None:
    for sender in senders:
        sender.send(tag, (numbers,), schema)


def _received(receiver: Receiver, tag: int) -> Tensor:
    (numbers,) = receiver.receive(tag)
    return numbers
