"""A job whose workers read with processes of their own: hocket's loader, and torch's.

`python -m tests.run.support.loader_processes FOLDER 2` launches it. Each process that
reads leaves a file in the folder: its kind and its number.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hocket.run.cluster.launch import launch
from hocket.run.data.sample_loader import SampleLoader
from tests.run.support.numbered_samples import Numbered

NEVER_S: Final = 600.0
SLOW_S: Final = 20.0  # for one sample


class Noted(Numbered):
    """Notes which process reads."""

    def __init__(self, folder: str, worker: int) -> None:
        super().__init__(8)
        self._folder, self._worker = folder, worker

    def inputs(self, rows: Tensor, draw: Any) -> Any:
        if os.getpid() != self._worker:
            note(self._folder, "ours")
        return super().inputs(rows, draw)


class Slow(Dataset[int]):
    """Takes long for all samples but the first."""

    def __init__(self, folder: str, *, kind: str) -> None:
        self._folder, self._kind = folder, kind

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        note(self._folder, self._kind)
        if index and self._kind == "slow":
            time.sleep(SLOW_S)
        return index


def note(folder: str, kind: str) -> None:
    """Leave a file that names this process."""
    Path(folder, f"{kind}-{os.getpid()}").touch()


def read(folder: str) -> None:
    """Read one batch with each loader, and wait for ever."""
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)
    loaders: list[Any] = [
        SampleLoader(Noted(folder, os.getpid()), 2, num_workers=1),
        DataLoader(Slow(folder, kind="torch"), num_workers=1),
        DataLoader(Slow(folder, kind="slow"), num_workers=1),
    ]
    iterators = [iter(loader) for loader in loaders]
    for batches in iterators:
        next(batches)
    note(folder, "worker")
    time.sleep(NEVER_S)


def main(folder: str, num_workers: int) -> None:
    """Read in workers of a job; or here, without a launcher."""
    if num_workers:
        launch(read, [folder], num_workers=num_workers, run_dir=folder)
    else:
        read(folder)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
