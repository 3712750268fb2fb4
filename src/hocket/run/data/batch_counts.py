"""Finds out when one worker's loader ends before another's, whose lengths are unknown.

    rank 0   batch 10 │ 11 │ no more: posts "12", and waits until all have posted
    rank 1   batch 10 │ 11 │ 12: its step waits for rank 0 ...
                             └ a thread reads "12", and posts "13"

Rank 0 then raises an error that names both counts; rank 1 notices that rank 0 is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Final

import torch.distributed as dist

from hocket.errors import DataError, WaitError
from hocket.run.cluster.store.poll import poll

_PERIOD_S: Final = 0.25


class BatchCounts:
    """Counts one worker's batches, and compares the count with the others'.

    Args:
        store: a store with a prefix of this run's own.
        rank: this worker's.
        num_workers: the number of all workers.
        timeout_s: how long to wait for another worker's last batch.
    """

    def __init__(
        self, store: dist.Store, rank: int, num_workers: int, timeout_s: float
    ) -> None:
        self._store = store
        self._rank = rank
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._loop = 0
        self._num_read = 0

    def counted(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield a loader's batches; every worker must call this."""
        self._loop += 1
        self._num_read = 0
        is_over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(is_over,), daemon=True)
        thread.start()
        try:
            for batch in batches:
                self._num_read += 1
                yield batch
        finally:
            is_over.set()
            thread.join()
        counts = f"{self._rank} {self._num_read}"
        self._store.set(self._key("ended"), counts)
        self._store.set(self._key(f"of rank {self._rank}"), counts)
        self._store.add(self._key("total"), self._num_read)
        self._store.add(self._key("num_ended"), 1)

    def agree(self, at_most_s: float | None = None) -> None:
        """Wait until all workers' batches have ended; called when this worker's have.

        Args:
            at_most_s: return after so long, whether or not they have: where steps
                overlap, another worker's last batches may wait for steps of this one
                that have not ended.

        Raises:
            DataError: another worker has more batches; names both counts.
            WaitError: another worker's batches did not end within the timeout.
        """
        more, num_ended = self._key("more"), self._key("num_ended")

        def is_known() -> bool:
            return self._store.add(
                num_ended, 0
            ) == self._num_workers or self._store.check([more])

        if not poll(is_known, self._timeout_s if at_most_s is None else at_most_s):
            if at_most_s is not None:
                return
            raise WaitError(
                f"the batches of rank {self._rank} ended after {self._num_read}, and "
                f"after {self._timeout_s:g} s not all other workers' had: another rank "
                "is gone, stuck, or slower than the timeout allows"
            )
        if self._store.check([more]):
            self._refuse(more)
        if self._store.add(self._key("total"), 0) != self._num_read * self._num_workers:
            for rank in range(self._num_workers):
                self._refuse(self._key(f"of rank {rank}"))

    def _refuse(self, key: str) -> None:
        rank, num_read = self._store.get(key).decode().split()
        if int(num_read) != self._num_read:
            raise DataError(
                f"the loader of rank {self._rank} ended after {self._num_read} "
                f"batches, that of rank {rank} has yielded {num_read}: give every "
                "worker the same data (the pipeline hands each worker its part)"
            )

    def _watch(self, is_over: threading.Event) -> None:
        """Post this worker's count where another's batches ended before."""
        with suppress(WaitError):  # a worker is gone, which the main thread finds out
            while not is_over.wait(_PERIOD_S):
                if not self._store.check([self._key("ended")]):
                    continue
                _, num_read = self._store.get(self._key("ended")).decode().split()
                if self._num_read > int(num_read):
                    self._store.set(self._key("more"), f"{self._rank} {self._num_read}")
                    return

    def _key(self, what: str) -> str:
        return f"batches {self._loop} {what}"
