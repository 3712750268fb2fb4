"""Moves groups of messages between two ranks, paired by their order alone.

Each pair of ranks has a communicator of its own, for both directions. The k-th group
that one rank posts meets the k-th of the other. What is written here about NCCL follows
its documentation and has not been run on several GPUs.

Every message goes through `batch_isend_irecv`, even if it is alone: torch has one
communicator for batched messages of a group, and others for single ones.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.run.cluster.device_waits import Posted, Reached, record_event
from hocket.run.cluster.group import leave_group, new_group


class WireMessage(NamedTuple):
    """A message as one rank posts it: its bytes, sent or received."""

    flat: Tensor
    sends: bool


class PairWires(ABC):
    """The communicators of this rank, one for each rank that it talks to."""

    @abstractmethod
    def post(self, peer: int, transfers: Sequence[WireMessage]) -> Posted:
        """Post messages together, behind all that was posted for this peer.

        Args:
            peer: the rank at the other end.
            transfers: the messages; the peer posts their other ends together.

        Returns:
            The operation, which ends when all of them have moved.
        """

    @abstractmethod
    def record_event(self) -> Reached:
        """Record an event in the current stream."""

    @abstractmethod
    def abort(self) -> None:
        """End all that was posted, without the peers. May be called in any thread."""

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Leave the communicators.

        Args:
            failed: whether something that was posted may not have ended.
        """


class NcclWires(PairWires):
    """NCCL's communicators. Every rank of the job must make these at the same time.

    Args:
        pairs: the ranks of each pair that exchanges messages; the same on all ranks. All ranks make
            the groups of all pairs in one order: torch names a group by how many there
            were before. A rank may be paired with itself, to try it.
        rank: this worker's rank.
        device: this worker's GPU.
        timeout_s: how long a rank may wait for others to make a group.
    """

    def __init__(
        self,
        pairs: Iterable[tuple[int, int]],
        rank: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self._device = device
        self._groups: dict[int, dist.ProcessGroup] = {}
        for a, b in sorted({(min(pair), max(pair)) for pair in pairs}):
            group = new_group(sorted({a, b}), timeout_s, "nccl")
            if rank in (a, b):
                peer = b if rank == a else a
                self._groups[peer] = group
                self._connect(peer)

    def post(self, peer: int, transfers: Sequence[WireMessage]) -> Posted:
        """See `PairWires.post`."""
        group = self._groups[peer]
        ops = [
            dist.P2POp(dist.isend if sends else dist.irecv, flat, peer, group)
            for flat, sends in transfers
        ]
        (work,) = dist.batch_isend_irecv(ops)
        return work

    def record_event(self) -> Reached:
        """See `PairWires.record_event`."""
        return record_event(self._device)

    def abort(self) -> None:
        """See `PairWires.abort`."""
        for group in self._groups.values():
            group.abort()

    def close(self, *, failed: bool) -> None:
        """See `PairWires.close`."""
        for _, group in sorted(self._groups.items()):
            # torch raises one of these if the job's groups were destroyed before.
            with contextlib.suppress(ValueError, TypeError):
                leave_group(group, failed=failed)
        self._groups.clear()

    def _connect(self, peer: int) -> None:
        """Send and receive one number, so that NCCL connects the pair now."""
        out, into = torch.zeros(2, 1, device=self._device).unbind()
        self.post(peer, [WireMessage(out, sends=True), WireMessage(into, sends=False)]).wait()
