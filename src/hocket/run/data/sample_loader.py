"""Loaders that read ahead, resume mid-epoch, and read only what a worker needs.

    ResumableSampler ──rows──▶ DataLoader's processes ──tensors──▶ training
          ▲                    read ahead                             │
          └───────────────── one batch has been taken ◀───────────────┘

Handed to `Pipeline.train` or `Pipeline.evaluate`, each worker reads the rows of its own
replica, their inputs where a stage of its takes some, and their targets on the last
stage (`hocket.run.data.reads`). Iterated over directly, they yield `(inputs, targets)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from copy import copy
from math import ceil
from typing import Any

import torch

from hocket.errors import DataError
from hocket.run.data.fetch import fetch
from hocket.run.data.reads import ReadSpec
from hocket.run.data.sampler import BatchRows, ResumableSampler
from hocket.run.data.samples import EpochRandom, Samples


class PartLoader(ABC):
    """A loader that can read a part of each batch.

    Args:
        samples: the data set.
        batch_size: samples per batch, over all microbatches and replicas.
        num_workers: processes that read ahead; with 0, batches are read when asked for.
    """

    def __init__(self, samples: Samples, batch_size: int, num_workers: int) -> None:
        self.samples = samples
        self.batch_size = batch_size
        self.num_workers = num_workers
        if samples.num_samples < 1:
            raise DataError("the data set is empty: there is no sample to load")
        if batch_size < 1:
            raise DataError(f"a batch of {batch_size} samples: give at least 1")

    @abstractmethod
    def parts(self, reads: ReadSpec | None) -> Iterator[Any]:
        """Yield the part of each batch that one worker needs.

        Args:
            reads: the part that the worker needs; None yields whole batches `(inputs,
                targets)`.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches that the next pass yields."""

    def __iter__(self) -> Iterator[Any]:
        """Yield whole batches `(inputs, targets)`."""
        return self.parts(None)

    def example(self) -> tuple[Any, Any]:
        """Return the first rows as a batch, to make a Pipeline with."""
        rows = torch.arange(min(self.batch_size, self.samples.num_samples))
        samples = copy(self.samples)  # the copy's caches are dropped with it
        return samples.inputs(rows, None), samples.targets(rows, None)


class SampleLoader(PartLoader):
    """Loads samples for training, and saves and restores its position.

    The position in `state_dict` is that of the next batch to be yielded, however many
    have been read ahead.

    Args:
        samples: the data set.
        batch_size: samples per batch, over all microbatches and replicas.
        seed: seeds the order and the augmentation; the same on every worker.
        shuffle: whether each epoch has an order of its own.
        varied: whether samples are augmented, if the data set does that.
        drop_last: leave out what does not fill a batch at the end of an epoch.
        num_batches: the batches over all epochs, after which a pass ends; each pass
            ends with its epoch when not given.
        num_workers: processes that read ahead; with 0, batches are read when asked for.

    Attributes:
        sampler: the order of the samples, and the position in it.

    Raises:
        DataError: there are no samples, or not one full batch.
    """

    def __init__(
        self,
        samples: Samples,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        varied: bool = True,
        drop_last: bool = True,
        num_batches: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__(samples, batch_size, num_workers)
        self.varied = varied
        self.drop_last = drop_last
        self.sampler = ResumableSampler(
            samples.num_samples,
            batch_size,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            num_batches=num_batches,
        )

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self.sampler.current.epoch

    @property
    def batches_per_epoch(self) -> int:
        """How many batches a whole epoch has."""
        return self.sampler.batches_per_epoch

    def __len__(self) -> int:
        """Return the number of batches that the next pass yields."""
        return len(self.sampler)

    def parts(self, reads: ReadSpec | None) -> Iterator[Any]:
        """Yield batches from the position to the end of the pass, advancing it."""
        draws = (
            (rows, self.draw(rows.epoch, reads)) for rows in self.sampler.upcoming()
        )
        fetched = fetch(self.samples, draws, reads, self.num_workers)
        return self.sampler.counted(fetched)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain JSON, for `Pipeline.save(data=)`."""
        fingerprint = self.samples.fingerprint
        return {**self.sampler.state_dict(), "fingerprint": fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position; batch size and number of replicas may differ.

        Raises:
            DataError: the state is malformed, or belongs to other data, seed or
                shuffling.
        """
        own = self.samples.fingerprint
        if state.get("fingerprint", own) != own:
            raise DataError(
                "this position was saved with other data (fingerprint "
                f"{state['fingerprint']:08x}, these have {own:08x}): give the same "
                "files as before, or start over"
            )
        self.sampler.load_state_dict(state)

    def draw(self, epoch: int, reads: ReadSpec | None) -> EpochRandom | None:
        """Return an epoch's random numbers; None where samples are as they are."""
        first = reads is not None and reads.draws_once
        seed = self.sampler.seed
        return EpochRandom(seed, 0 if first else epoch) if self.varied else None


class EvaluationLoader(PartLoader):
    """Loads every sample once, in order and as it is; the last batch may be smaller.

    Args:
        samples: the data set.
        batch_size: samples per batch, over all microbatches and replicas.
        num_workers: processes that read ahead; with 0, batches are read when asked for.

    Raises:
        DataError: there are no samples.
    """

    def __init__(
        self, samples: Samples, batch_size: int, *, num_workers: int = 0
    ) -> None:
        super().__init__(samples, batch_size, num_workers)

    def __len__(self) -> int:
        """Return the number of batches of a pass."""
        return ceil(self.samples.num_samples / self.batch_size)

    def parts(self, reads: ReadSpec | None) -> Iterator[Any]:
        """Yield all batches, from the beginning."""
        rows = torch.arange(self.samples.num_samples).split(self.batch_size)
        draws = ((BatchRows(0, each), None) for each in rows)
        return fetch(self.samples, draws, reads, self.num_workers)
