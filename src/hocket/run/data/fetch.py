"""Reads batches of samples ahead of time, in processes of a DataLoader.

Each reads the rows and sides that its worker needs (`ReadSpec`), and nothing else. The
DataLoader keeps their order.
"""

from __future__ import annotations

import os
import signal
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import tee
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hocket.errors import HocketError, RunError
from hocket.run.cluster.start import end_with_parent, is_main_thread
from hocket.run.data.batch import on_device
from hocket.run.data.reads import PartBatch, ReadSpec
from hocket.run.data.sampler import BatchRows
from hocket.run.data.samples import EpochRandom, Samples

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
        worker_init_fn=_end_with_parent if is_main_thread() else _stay_for_parent,
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


def _end_with_parent(number: int) -> None:
    """End a process that reads when its parent is killed; torch's would read on."""
    end_with_parent()
    _stay_for_parent(number)


def _stay_for_parent(_: int) -> None:
    """Let a SIGTERM end a process that reads only if its parent has sent it.

    torchrun sends one to a worker's whole process group, and the worker may still need
    batches for the step after which it saves.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_parent_asks, daemon=True).start()


def _end_when_parent_asks() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def _as_it_is(fetched: Any) -> Any:
    return fetched


def _digest(samples: Samples, rows: BatchRows, draw: EpochRandom | None) -> int:
    """Return 32 bits of a batch: equal for equal rows, random numbers and data sets."""
    words = [samples.fingerprint, rows.epoch, -1 if draw is None else draw.seed]
    return zlib.crc32(rows.rows.numpy().tobytes(), zlib.crc32(repr(words).encode()))
