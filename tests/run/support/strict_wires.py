"""Wires that pair messages by their order alone, and block all that is posted later.

gloo pairs messages by name, and would hide a wrong order. Here the k-th group that one
rank posts for another must be the other end of the k-th that the other posts: as many
messages, of the same sizes, sent where received. Anything else is an error at once.

`post` returns when the peer has posted its group: so each message blocks whatever its
rank does afterwards, as a kernel of NCCL would on a GPU with one hardware queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from hocket.run.comm.dist.pair_wires import PairWires, WireMessage

_MOST: Final = 8  # messages of a group
_TAGS: Final = 1 << 20  # above those of other messages in the job's group


class Passed:
    """An operation that has ended, and an event that has passed."""

    def is_completed(self) -> bool:
        """See `Posted`."""
        return True

    def wait(self) -> None:
        """See `Posted`."""

    def query(self) -> bool:
        """See `Reached`."""
        return True


class StrictWires(PairWires):
    """Exchanges groups over the job's gloo group.

    Args:
        pairs: the ranks of each pair that talks.
        rank: this worker's rank.
        timeout_s: how long a peer may take to post its group.

    Attributes:
        num_messages: messages in groups, by the group's size.
    """

    def __init__(
        self, pairs: Iterable[tuple[int, int]], rank: int, timeout_s: float
    ) -> None:
        self.num_messages: Counter[int] = Counter()
        self._peers = {b if a == rank else a for a, b in pairs if rank in (a, b)}
        self._rank = rank
        self._timeout = timedelta(seconds=timeout_s)
        self._num_posted: Counter[int] = Counter()
        self._failed: bool | None = None

    def post(self, peer: int, transfers: Sequence[WireMessage]) -> Passed:
        """See `PairWires.post`."""
        assert self._failed is None, "closed"
        assert peer in self._peers, (self._rank, peer, self._peers)
        number = self._num_posted[peer]
        self._num_posted[peer] += 1
        own = torch.tensor(_described(transfers))
        other = torch.empty_like(own)
        tag = _TAGS + 16 * (number % 1024)
        self._exchange([WireMessage(own, True), WireMessage(other, False)], peer, tag)
        wanted = torch.tensor(_described([WireMessage(x, not s) for x, s in transfers]))
        # Both sides of a group are compared direction by direction.
        if not torch.equal(_sorted(other), _sorted(wanted)):
            raise AssertionError(
                f"rank {self._rank} posts {own.tolist()} as number {number} for rank "
                f"{peer}, which posts {other.tolist()}"
            )
        self._exchange(transfers, peer, tag + 1)
        self.num_messages[len(transfers)] += len(transfers)
        return Passed()

    def record_event(self) -> Passed:
        """See `PairWires.record_event`."""
        return Passed()

    def abort(self) -> None:
        """See `PairWires.abort`."""
        raise AssertionError("nothing is late where each post waits")

    def close(self, *, failed: bool) -> None:
        """See `PairWires.close`."""
        self._failed = failed

    @property
    def is_closed_cleanly(self) -> bool:
        """Whether it was closed, and nothing was left."""
        return self._failed is False

    def _exchange(self, transfers: Sequence[WireMessage], peer: int, tag: int) -> None:
        """Start all at once, and wait for each; those of one direction in order."""
        counts: Counter[bool] = Counter()
        works = []
        for flat, sends in transfers:
            start = dist.isend if sends else dist.irecv
            works.append(start(flat, peer, tag=tag + counts[sends]))
            counts[sends] += 1
        for work in works:
            assert work is not None
            work.wait(self._timeout)


def _described(transfers: Sequence[WireMessage]) -> list[int]:
    """The sizes of what is sent, as positive numbers, and received, as negative."""
    assert len(transfers) <= _MOST
    sizes = [x.numel() if sends else -x.numel() for x, sends in transfers]
    return sizes + [0] * (_MOST - len(sizes))


def _sorted(sizes: torch.Tensor) -> torch.Tensor:
    """Sends first, in their order, and receives behind them."""
    return torch.cat([sizes[sizes > 0], sizes[sizes < 0]])
