"""Saves and loads the checkpoints of one run, on all its workers together."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.errors import CheckpointError, DataError, HocketError, RunError
from hocket.model.stages.outline import Outline
from hocket.run.checkpoint.collect import Tensors, WorkerShare
from hocket.run.checkpoint.commit import SaveJob, clean, commit
from hocket.run.checkpoint.format.durable import FolderLock, token_in
from hocket.run.checkpoint.format.manifest import RunRecord, Section
from hocket.run.checkpoint.load import Candidates, Loaded, agreed
from hocket.run.cluster.device_waits import record_event
from hocket.run.cluster.store.poll import poll
from hocket.run.cluster.store.store_exchange import StoreExchange
from hocket.run.cluster.world import World
from hocket.run.diagnostics.flight_recorder import FlightRecorder

# Writes one checkpoint while training goes on: a thread, and copies on the host.


_NICENESS: Final = 19  # training has the cores first


class BackgroundWriter:
    """Writes one checkpoint at a time; `wait` raises its errors."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: HocketError | None = None
        self._is_abandoned = threading.Event()

    def start(self, write: Callable[[], object]) -> None:
        """Start to write; the previous checkpoint must have been waited for."""
        assert self._thread is None
        self._thread = threading.Thread(
            target=self._run, args=(write,), name="hocket checkpoint", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Wait until nothing is being written, without raising errors."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            CheckpointError: the checkpoint could not be written.
            RunError: another worker failed to take part.
        """
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def abandon(self, grace_s: float) -> None:
        """Wait a little for the end; then stop writing and remove the files."""
        if self._thread is not None:
            self._thread.join(grace_s)
            self._is_abandoned.set()
            self._thread.join(grace_s)
            self._thread = self._error = None

    def wants_more(self) -> None:
        """Raise if the writing is to stop; the writer calls this now and then.

        Raises:
            CheckpointError: the writing was abandoned.
        """
        if self._is_abandoned.is_set():
            raise CheckpointError("the run ended while its checkpoint was written")

    def _run(self, write: Callable[[], object]) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            write()
        except HocketError as error:
            self._error = error
        except Exception as error:
            self._error = RunError(f"writing a checkpoint: {error!r}")


class HostCopies:
    """Memory for copies, reused from save to save.

    Only one save may use it at a time.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Section, str], Tensor] = {}

    def copy(self, tensors: Tensors) -> Tensors:
        """Copy tensors; the copies are complete when this returns."""
        kept, self._kept = self._kept, {}
        device: torch.device | None = None
        for section, named in tensors.items():
            for name, tensor in named.items():
                copy = _fitting(kept.pop((section, name), None), tensor)
                copy.copy_(tensor, non_blocking=True)
                self._kept[section, name] = copy
                device = tensor.device if tensor.is_cuda else device
        if device is not None:
            # Not all streams: others may wait for messages.
            record_event(device).synchronize()
        return {
            section: {name: self._kept[section, name] for name in named}
            for section, named in tensors.items()
        }


def _fitting(copy: Tensor | None, tensor: Tensor) -> Tensor:
    if copy is not None and (copy.shape, copy.dtype) == (tensor.shape, tensor.dtype):
        return copy
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


# Workers wait for the slowest disk: the whole model at so many bytes per second.
_SLOW_BYTES_PER_S: Final = 10e6
_STATE_PER_WEIGHT: Final = 5  # weight, two moments, average, old one
_GRACE_S: Final = 1.5  # for a checkpoint that is being written when the run fails
_VISIBLE_S: Final = 10.0  # until a network file system shows a new file


class Saved(Protocol):
    """What one worker saves and loads."""

    outline: Outline
    world: World

    @property
    def store(self) -> dist.Store:
        """A store with a prefix of the run's own."""

    def record(self) -> RunRecord:
        """Return the run's record, without the step and the user's data."""

    def share(self) -> WorkerShare:
        """Return what this worker writes, with live tensors.

        Raises:
            CheckpointError: it cannot be written.
        """

    def load(self, candidates: Candidates, exchange: StoreExchange) -> Loaded:
        """Load a checkpoint's state; every worker must call this.

        Raises:
            CheckpointError: there is none, it is of another model, or damaged; nothing
                was changed.
        """


class CheckpointManager:
    """Saves and loads for one worker of a run.

    Args:
        run: what is saved.
        recorder: records saves and loads, if there is one.
        timeout_s: how long workers wait for each other, beside the time for the disk.
    """

    def __init__(
        self, run: Saved, recorder: FlightRecorder | None, *, timeout_s: float
    ) -> None:
        self._run = run
        self._recorder = recorder
        disk_s = _STATE_PER_WEIGHT * run.outline.parameter_bytes / _SLOW_BYTES_PER_S
        self._timeout_s = timeout_s + disk_s
        self._num_exchanges = 0
        self._writer = BackgroundWriter()
        self._copies = HostCopies()
        self._lock: FolderLock | None = None
        self._folder: Path | None = None

    def save(
        self,
        folder: Path,
        step: int,
        *,
        data: Any,
        background: bool,
        keep: int | None,
        num_filled: int = 0,
    ) -> None:
        """Save the run's state after `step` steps; every worker must call this.

        Raises:
            DataError: `data` is not JSON.
            CheckpointError: this checkpoint, or the previous one in the background,
                could not be written; raised on all workers, and training may go on.
        """
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep={keep}: keep at least 1, or None for all")
        data, folder = as_json(data), folder.absolute()
        with self._noted("save", step):
            self._writer.wait()
            self._enter(folder)
            known = self._run.record()
            run = replace(known, step=step, data=data, num_filled=num_filled)
            share = _attempted(self._run.share if not background else self._copied)
            exchange = self._exchange()
            if background:
                job = SaveJob(folder, run, keep, self._writer.wants_more)
                self._writer.start(partial(commit, job, share, exchange))
            else:
                commit(SaveJob(folder, run, keep), share, exchange)

    def load(self, folder: Path, step: int | str, *, allow_previous: bool) -> Loaded:
        """Load a checkpoint's state; every worker must call this.

        Raises:
            CheckpointError: there is none, it is of another model, or damaged; nothing
                was changed.
        """
        with self._noted("load", 0):
            self._writer.wait()
            candidates = Candidates(folder, step, allow_previous)
            return self._run.load(candidates, self._exchange())

    def join(self) -> None:
        """Wait for the background write; `finish` raises its error."""
        self._writer.join()

    def finish(self) -> None:
        """Wait for the background write.

        Raises:
            CheckpointError: it could not be written.
        """
        self._writer.wait()

    def release(self) -> None:
        """Release the folder; a write that does not end soon is abandoned."""
        self._writer.abandon(_GRACE_S)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _enter(self, folder: Path) -> None:
        """Lock a folder, the first time that a checkpoint is saved there."""
        if folder == self._folder:
            return
        exchange = self._exchange()
        take = partial(self._take, folder) if exchange.rank == 0 else str
        [token, *_] = agreed(exchange, "lock", take)
        check = partial(_check_shared_folder, folder, str(token), exchange.rank)
        agreed(exchange, "folder", check)
        self._folder = folder

    def _take(self, folder: Path) -> str:
        if self._lock is not None:
            self._lock.release()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(folder)
        except OSError as error:
            raise CheckpointError(
                f"cannot save checkpoints in {folder.absolute()}: {error.strerror}"
            ) from error
        clean(folder)
        return self._lock.token

    def _copied(self) -> WorkerShare:
        share = self._run.share()
        return replace(share, tensors=self._copies.copy(share.tensors))

    @contextmanager
    def _noted(self, what: str, step: int) -> Iterator[None]:
        if self._recorder is None:
            yield
            return
        self._recorder.begin(what, step)
        try:
            yield
        finally:
            self._recorder.end()

    def _exchange(self) -> StoreExchange:
        """Return an exchange for this save only, since saves overlap with others."""
        self._num_exchanges += 1
        prefix = f"checkpoint {self._num_exchanges}"
        exchange = self._run.world.exchange
        return StoreExchange(
            dist.PrefixStore(prefix, self._run.store),
            exchange.rank,
            exchange.world_size,
            self._timeout_s,
        )


def _attempted(make: Callable[[], WorkerShare]) -> Callable[[], WorkerShare]:
    """Call a function now; the result raises its error later, on all workers."""
    attempt: Future[WorkerShare] = Future()
    try:
        attempt.set_result(make())
    except CheckpointError as error:
        attempt.set_exception(error)
    return attempt.result


def _check_shared_folder(folder: Path, token: str, rank: int) -> str:
    """Check that this worker sees the folder that rank 0 has locked."""
    if not poll(lambda: token_in(folder) == token, _VISIBLE_S):
        raise CheckpointError(
            f"rank {rank} does not see the folder of rank 0 at {folder.absolute()}: "
            "checkpoints go to one folder that all hosts share, given as the same "
            "absolute path"
        )
    return ""


def as_json(data: Any) -> Any:
    """Return the user's data as it is saved.

    Raises:
        DataError: it is not JSON.
    """
    try:
        return json.loads(json.dumps(data))
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"data= must be JSON, to be saved: {error}") from error
