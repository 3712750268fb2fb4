"""The order in which training uses samples, and the place in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any
from zlib import crc32

import torch

from hocket.freeze.cache.next_use import NextUse
from hocket.freeze.cache.settings import Cache
from hocket.run.data.reads import PartBatch, ReadSpec
from hocket.run.data.sample_loader import SampleLoader
from hocket.run.data.sampler import BatchRows
from hocket.run.elastic.cache.cache_refusals import checked_loader


class TrainingOrder:
    """Follows a loader, batch by batch.

    Args:
        settings: the cache's.
        num_parts: the microbatches of the whole batch.
        accumulate: batches of a step.
        device: where batches go.

    Attributes:
        use: when samples are used next.
        num_samples: rows of the data set.
    """

    def __init__(
        self, settings: Cache, num_parts: int, accumulate: int, device: torch.device
    ) -> None:
        self.use = NextUse(0, 0, 1, lambda _: torch.arange(0).numpy())
        self.num_samples = 0
        self._settings = settings
        self._num_parts = num_parts
        self._accumulate = accumulate
        self._device = device
        self._loader: SampleLoader | None = None
        self._recent: deque[BatchRows] = deque()  # of the present step

    def begin(self, loader: Iterable[Any]) -> Iterator[PartBatch]:
        """Follow a loader from its position on; return its whole batches.

        Raises:
            DataError: it does not name its samples, or they vary.
        """
        if loader is not self._loader:
            self._loader = checked_loader(loader, self._settings)
        checked = self._loader
        self._recent.clear()
        self.num_samples = checked.samples.num_samples
        sampler = checked.sampler
        num_used = sampler.num_samples
        if sampler.drop_last:
            num_used = sampler.batches_per_epoch * sampler.batch_size
        seed = sampler.seed if checked.varied else None
        data = checked.samples.fingerprint, self.num_samples, seed
        self.use = NextUse(
            crc32(repr(data).encode()),
            sampler.num_samples,
            num_used,
            lambda epoch: sampler.order(epoch).numpy(),
        )
        self.use.now = sampler.current.epoch * num_used + sampler.current.position
        spec = ReadSpec(
            inputs=True,
            targets=True,
            num_microbatches=self._num_parts,
            num_replicas=1,
            replica=0,
            device=self._device,
            draws_once=True,  # also where no sample seems to vary
        )
        return checked.parts(spec)

    def advance(self, batch: PartBatch) -> tuple[list[int], bool]:
        """Go on to the step that a batch is of.

        Returns:
            The samples of steps that are over, and whether an epoch is.
        """
        assert batch.samples is not None
        self._recent.append(batch.samples)
        samples: list[int] = []
        epochs = {batch.samples.epoch}
        while len(self._recent) > self._accumulate:
            over = self._recent.popleft()
            samples += over.rows.tolist()
            epochs.add(over.epoch)
        first = self._recent[0]
        self.use.now = self.use.time_of(first.epoch, int(first.rows[0]))
        return samples, len(epochs) > 1
