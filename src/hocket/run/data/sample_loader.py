"""Loaders that read ahead, resume mid-epoch, and read only what a worker needs.

    ResumableSampler ──rows──▶ DataLoader's processes ──tensors──▶ training
          ▲                    read ahead                             │
          └───────────────── one batch has been taken ◀───────────────┘

Handed to `Pipeline.train` or `Pipeline.evaluate`, each worker reads the rows of its own
replica, their inputs where a stage of its takes some, and their targets on the last
stage (`hocket.run.data.reads`). Iterated over directly, they yield `(inputs, targets)`.

The processes keep the order, and read nothing but what a worker needs (`ReadSpec`).
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from itertools import tee
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hocket.errors import DataError, HocketError, RunError
from hocket.run.cluster.start import is_main_thread
from hocket.run.data.batch import on_device
from hocket.run.data.reading_processes import end_and_stay, stay
from hocket.run.data.reads import PartBatch, ReadSpec
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


Task = tuple[BatchRows, EpochRandom | None]


def fetch(
    samples: Samples, tasks: Iterator[Task], reads: ReadSpec | None, num_workers: int
) -> Iterator[Any]:
    """Read batches in order.

    Args:
        samples: the data set.
        tasks: the rows of each batch, and the random numbers of its epoch.
        reads: the part that this worker needs; None yields whole batches `(inputs,
            targets)`.
        num_workers: processes that read ahead; with 0, batches are read when asked for.

    Raises:
        HocketError: the samples raised it, in any of the processes.
        RunError: a process that reads has ended.
    """
    fetcher = _Fetcher(samples, reads)
    if num_workers:  # what the samples cache here is shared with all processes
        fetcher.read(torch.zeros(1, dtype=torch.int64), None)
    tasks, ahead = tee(tasks)
    loader = DataLoader(
        fetcher,
        sampler=ahead,  # batches, and none of them put together by the DataLoader
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=num_workers,
        pin_memory=reads is not None and reads.device.type == "cuda",
        generator=torch.Generator(),  # or it would draw from the global one
        worker_init_fn=end_and_stay if is_main_thread() else stay,
    )
    for (rows, draw), fetched in zip(tasks, _worker_errors_named(loader), strict=True):
        if isinstance(fetched, _Failed):
            raise fetched.error
        if reads is None:
            yield fetched
            continue
        inputs, targets = on_device(fetched, reads.device)
        yield PartBatch(
            len(rows.rows),
            _digest(samples, rows, draw),
            reads.rows(len(rows.rows)),
            inputs,
            targets,
            rows,
        )


@dataclass(frozen=True, slots=True)
class _Failed:
    """An error of hocket's, carried from a reading process to the training process.

    The DataLoader would bury the message under a traceback.
    """

    error: HocketError


class _Fetcher(Dataset[Any]):
    """Reads one batch per index; runs in a DataLoader's process."""

    def __init__(self, samples: Samples, reads: ReadSpec | None) -> None:
        self._samples = samples
        self._reads = reads

    def __getitem__(self, task: Task) -> Any:
        batch, draw = task
        rows = batch.rows
        if self._reads is not None:
            rows = rows[self._reads.rows(len(rows))]
        try:
            return self.read(rows, draw)
        except HocketError as error:
            return _Failed(error)

    def read(self, rows: Tensor, draw: EpochRandom | None) -> tuple[Any, Any]:
        """Read the inputs and targets that are needed; None for the others."""
        reads, samples = self._reads, self._samples
        reads_inputs = reads is None or (reads.inputs and len(rows) > 0)
        reads_targets = reads is None or (reads.targets and len(rows) > 0)
        return (
            samples.inputs(rows, draw) if reads_inputs else None,
            samples.targets(rows, draw) if reads_targets else None,
        )


def _worker_errors_named(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield a DataLoader's batches; explain the error if a process of it ends.

    Raises:
        RunError: a process has ended.
    """
    try:
        yield from loader
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise RunError(
            f"a process that reads ahead has ended ({str(error).strip()}): there may "
            f"be too little memory, or too little of it in /dev/shm; num_workers is "
            f"{loader.num_workers}, and 0 reads without such processes"
        ) from error


def _as_it_is(fetched: Any) -> Any:
    return fetched


def _digest(samples: Samples, rows: BatchRows, draw: EpochRandom | None) -> int:
    """Return 32 bits of a batch: equal for equal rows, random numbers and data sets."""
    words = [samples.fingerprint, rows.epoch, -1 if draw is None else draw.seed]
    return zlib.crc32(rows.rows.numpy().tobytes(), zlib.crc32(repr(words).encode()))
