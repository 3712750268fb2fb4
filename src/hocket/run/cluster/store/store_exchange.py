"""Exchanges small JSON values between workers through the store.

For what is rare (agreeing on a plan, a barrier at the end): a round takes milliseconds.
Every worker must make the same exchanges in the same order; each has its own keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import torch.distributed as dist

from hocket.errors import SchemaError, WaitError
from hocket.run.cluster.store.poll import poll
from hocket.run.diagnostics.job_folder import Json

MAX_BYTES: Final = 16 * 2**20  # of one worker's JSON


@dataclass(frozen=True, slots=True)
class StoreExchange:
    """One worker's end of the exchanges.

    Args:
        store: the store that all workers share, with a prefix of this attempt's own.
        rank: this worker's rank.
        world_size: number of workers.
        timeout_s: how long to wait for the others.
        rank_0_holds_store: whether rank 0's own process hosts the store; after a
            barrier it then ends last.
    """

    store: dist.Store
    rank: int
    world_size: int
    timeout_s: float
    rank_0_holds_store: bool = False
    _turns: Iterator[int] = field(default_factory=count)

    def gather(self, name: str, value: Json) -> list[Any]:
        """Return every worker's value, by rank, on every worker.

        Raises:
            WaitError: ranks that the message names did not come.
            SchemaError: a value is longer than 16 MiB.
        """
        keys = self._keys(name, range(self.world_size))
        self._set(keys[self.rank], value)
        self._wait(keys, name, self.timeout_s)
        return [self._get(key) for key in keys]

    def broadcast(
        self,
        name: str,
        value: Json,
        from_rank: int = 0,
        timeout_s: float | None = None,
    ) -> Any:
        """Return one worker's value; those of the others are ignored.

        Args:
            name: the exchange's name, for errors.
            value: the value to send, on the sending rank.
            from_rank: the rank that sends.
            timeout_s: how long to wait for it; the exchange's timeout when not given.

        Raises:
            WaitError: the sending worker did not come.
            SchemaError: the value is longer than 16 MiB.
        """
        [key] = self._keys(name, [from_rank])
        if self.rank == from_rank:
            self._set(key, value)
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        self._wait([key], name, timeout_s, [from_rank])
        return self._get(key)

    def barrier(self, name: str, timeout_s: float | None = None) -> None:
        """Return when every worker has called this.

        Raises:
            WaitError: ranks that the message names did not come.
        """
        keys = self._keys(name, range(self.world_size))
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        self.store.set(keys[self.rank], "")
        self._wait(keys, name, timeout_s)
        if self.rank_0_holds_store:
            self._leave_in_order([f"{key}/seen" for key in keys], name, timeout_s)

    def _leave_in_order(self, keys: Sequence[str], name: str, timeout_s: float) -> None:
        """Let rank 0 return last, since the store ends with it."""
        if self.rank:
            self.store.set(keys[self.rank], "")
        else:
            self._wait(keys[1:], name, timeout_s, range(1, self.world_size))

    def _keys(self, name: str, ranks: Sequence[int]) -> list[str]:
        turn = next(self._turns)
        return [f"exchange/{turn}/{name}/{rank}" for rank in ranks]

    def _set(self, key: str, value: Json) -> None:
        text = json.dumps(value)
        if len(text) > MAX_BYTES:
            raise SchemaError(
                f"rank {self.rank} wants to send the others {len(text):,} bytes "
                f"({key}); exchanges are for at most {MAX_BYTES:,}"
            )
        self.store.set(key, text)

    def _get(self, key: str) -> Any:
        return json.loads(self.store.get(key))

    def _wait(
        self,
        keys: Sequence[str],
        name: str,
        timeout_s: float,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Poll the store; name the ranks that do not come."""
        ranks = range(self.world_size) if ranks is None else ranks
        missing = dict(zip(ranks, keys, strict=True))

        def have_come() -> bool:
            for rank in [r for r, key in missing.items() if self.store.check([key])]:
                del missing[rank]
            return not missing

        try:
            if poll(have_come, timeout_s):
                return
        except dist.DistError as error:
            raise WaitError(
                f"rank {self.rank} lost the store at {name!r}; its holder (the "
                f"launcher of the first host) is gone: {error}"
            ) from error
        names = ", ".join(map(str, missing))
        raise WaitError(
            f"rank {self.rank} waited {timeout_s:g} s at {name!r} for "
            f"rank{'s' if len(missing) > 1 else ''} {names}"
        )
