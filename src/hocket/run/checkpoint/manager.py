"""Saves and loads the checkpoints of one run, on all its workers together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import torch.distributed as dist

from hocket.errors import CheckpointError, DataError
from hocket.model.stages.outline import Outline
from hocket.run.checkpoint.background import BackgroundWriter, HostCopies
from hocket.run.checkpoint.collect import WorkerShare
from hocket.run.checkpoint.commit import SaveJob, clean, commit
from hocket.run.checkpoint.format.durable import FolderLock, token_in
from hocket.run.checkpoint.format.manifest import RunRecord
from hocket.run.checkpoint.load import Candidates, Loaded, agreed
from hocket.run.cluster.store.poll import poll
from hocket.run.cluster.store.store_exchange import StoreExchange
from hocket.run.cluster.world import World
from hocket.run.diagnostics.flight_recorder import FlightRecorder

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


R = TypeVar("R", bound=Saved)


class CheckpointManager(Generic[R]):
    """Saves and loads for one worker of a run.

    Args:
        run: what is saved.
        recorder: records saves and loads, if there is one.
        timeout_s: how long workers wait for each other, beside the time for the disk.
    """

    def __init__(
        self, run: R, recorder: FlightRecorder | None, *, timeout_s: float
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
