"""Saves and loads the checkpoints of one pipeline, on all its workers together."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import torch.distributed as dist
from torch import Tensor

from hocket.errors import CheckpointError, DamagedError, DataError
from hocket.model.stages.outline import Outline
from hocket.run.checkpoint.background import BackgroundWriter
from hocket.run.checkpoint.collect import WorkerShare, collect, describe
from hocket.run.checkpoint.commit import SaveJob, clean, commit
from hocket.run.checkpoint.format.lock import FolderLock, token_in
from hocket.run.checkpoint.format.manifest import FreezingRecord, RunRecord
from hocket.run.checkpoint.format.newest import find, previous
from hocket.run.checkpoint.format.opened import (
    OpenedCheckpoint,
    check_pointer,
    check_tensors,
    open_checkpoint,
)
from hocket.run.checkpoint.format.read import read_tensors
from hocket.run.checkpoint.restore import (
    Key,
    RestorePlan,
    check_fits,
    check_states,
    make_restore_plan,
    restore,
    watched_tensors,
)
from hocket.run.checkpoint.snapshot import HostCopies
from hocket.run.cluster.store.poll import poll
from hocket.run.cluster.store.store_exchange import StoreExchange
from hocket.run.cluster.world import World
from hocket.run.diagnostics.flight_recorder import FlightRecorder
from hocket.run.engine.executor import Executor, PlayedLayout

log = logging.getLogger(__name__)

# Workers wait for the slowest disk: the whole model at so many bytes per second.
_SLOW_BYTES_PER_S: Final = 10e6
_STATE_PER_WEIGHT: Final = 6  # weight, two moments, average, old one, correction
_GRACE_S: Final = 1.5  # for a checkpoint that is being written when the run fails
_VISIBLE_S: Final = 10.0  # until a network file system shows a new file


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of a load.

    Args:
        path: the checkpoint.
        step: the number of the next step.
        data: the user's data that was saved with it.
    """

    path: Path
    step: int
    data: Any


class LayerFreezing(Protocol):
    """What freezes layers and changes the layout, as checkpoints see it."""

    def record(self, played: PlayedLayout) -> FreezingRecord:
        """Return the frozen layers and the policy's state."""

    def watched(self, executor: Executor) -> Mapping[str, Tensor]:
        """Return what the policy measured of this worker's weights, by name."""

    def enter(
        self, saved: FreezingRecord | None, now: PlayedLayout, step: int
    ) -> PlayedLayout:
        """Cut the net as it was saved; every worker must call this.

        Raises:
            CheckpointError: the checkpoint's layers cannot be frozen here; raised on
                all workers, and nothing is changed.
        """

    def leave(self, before: PlayedLayout, after: PlayedLayout) -> None:
        """Undo `enter`."""

    def resume(
        self,
        saved: FreezingRecord | None,
        played: PlayedLayout,
        watched: Mapping[str, Tensor],
    ) -> None:
        """Restore the policy's state, once the weights are restored."""


class CheckpointManager:
    """Saves and loads for one worker of a pipeline.

    Args:
        outline: the uncut model's outline.
        played: what the workers play.
        world: the job.
        recorder: records saves and loads.
        freezing: freezes layers while training runs; None if nothing does.
        timeout_s: how long workers wait for each other, beside the time for the disk.

    Attributes:
        played: what the workers play; a load may change it.
    """

    def __init__(
        self,
        outline: Outline,
        played: PlayedLayout,
        world: World,
        recorder: FlightRecorder,
        freezing: LayerFreezing | None,
        *,
        timeout_s: float,
    ) -> None:
        self._outline = outline
        self._recorder = recorder
        self.played = played
        self._freezing = freezing
        self._world = world
        disk_s = _STATE_PER_WEIGHT * outline.parameter_bytes / _SLOW_BYTES_PER_S
        self._timeout_s = timeout_s + disk_s
        self._num_exchanges = 0
        self._writer = BackgroundWriter()
        self._copies = HostCopies()
        self._lock: FolderLock | None = None
        self._folder: Path | None = None
        self._base: RunRecord | None = None

    def go_on_with(self, played: PlayedLayout) -> None:
        """Save and load the stages of another layout from now on."""
        self._writer.wait()
        self.played, self._base = played, None

    def save(
        self, folder: Path, step: int, *, data: Any, background: bool, keep: int | None
    ) -> None:
        """Save the run's state after `step` steps; every worker must call this.

        Raises:
            DataError: `data` is not JSON.
            CheckpointError: this checkpoint, or the previous one in the background,
                could not be written; raised on all workers, and training may go on.
        """
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep={keep}: keep at least 1, or None for all")
        data = _as_json(data)
        with self._noted("save", step):
            self._writer.wait()
            self._enter(folder)
            run = replace(self._run(), step=step, data=data)
            share = _attempted(self._collected if not background else self._copied)
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
            return self._load(folder, step, allow_previous=allow_previous)

    def _load(self, folder: Path, step: int | str, *, allow_previous: bool) -> Loaded:
        exchange = self._exchange()
        find_all = partial(_candidates, folder, step, allow_previous=allow_previous)
        find_here = find_all if exchange.rank == 0 else list
        [candidates, *_] = _agreed(exchange, "candidates", find_here)
        faults: list[str] = []
        for name in candidates:
            path = folder / str(name)
            found = self._read(path, exchange)
            if not isinstance(found, str):
                needs, tensors = found
                executor, layout = self.played.executor, self.played.layout
                restore(needs, tensors, executor, layout, self._world)
                run = needs.opened.manifest.run
                if self._freezing is not None:
                    watched = watched_tensors(needs, tensors)
                    self._freezing.resume(run.freezing, self.played, watched)
                return Loaded(path, run.step, run.data)
            faults.append(found)
            log.warning("%s", found)
        hint = "" if allow_previous else _HINT
        raise DamagedError(f"{'; '.join(faults)}. Nothing was loaded{hint}")

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
        if folder.absolute() == self._folder:
            return
        exchange = self._exchange()
        take = partial(self._take, folder) if exchange.rank == 0 else str
        [token, *_] = _agreed(exchange, "lock", take)
        check = partial(_check_shared_folder, folder, str(token), exchange.rank)
        _agreed(exchange, "folder", check)
        self._folder = folder.absolute()

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

    def _run(self) -> RunRecord:
        """Return the run's record, without the step and the user's data."""
        if self._base is None:
            executor, layout = self.played.executor, self.played.layout
            self._base = describe(self._outline, executor, layout)
        executor, freezing = self.played.executor, None
        state = None if executor.scaler is None else executor.scaler.state_dict()
        runner = next(iter(executor.runners.values()))
        if self._freezing is not None:
            freezing = self._freezing.record(self.played)
        return replace(self._base, seed=runner.seed, scaler=state, freezing=freezing)

    def _collected(self) -> WorkerShare:
        watched: Mapping[str, Tensor] = {}
        if self._freezing is not None:
            watched = self._freezing.watched(self.played.executor)
        return collect(self.played, self._world, watched)

    def _copied(self) -> WorkerShare:
        share = self._collected()
        return replace(share, tensors=self._copies.copy(share.tensors))

    def _read(
        self, path: Path, exchange: StoreExchange
    ) -> tuple[RestorePlan, dict[Key, Tensor]] | str:
        """Read what this worker needs, in the layout in which it was saved.

        Returns:
            What was read, and `played` is the layout for it; or the damage if any
            worker finds some.

        Raises:
            CheckpointError: it does not fit, on some worker.
        """
        if self._freezing is None:
            return self._read_into_layout(path, exchange)
        opened: list[OpenedCheckpoint] = []

        def open_here() -> str:
            try:
                opened.append(open_checkpoint(path))
                check_fits(opened[0], self._outline, self._run())
            except DamagedError as error:
                return str(error)
            return ""

        damages = _agreed(exchange, f"open {path.name}", open_here)
        if any(damages):
            return next(str(x) for x in damages if x)
        before, run = self.played, opened[0].manifest.run
        self.played = self._freezing.enter(run.freezing, before, run.step)
        self._base = None
        try:
            found = self._read_into_layout(path, exchange)
        except CheckpointError:
            self._return_to(before)
            raise
        if isinstance(found, str):
            self._return_to(before)
        return found

    def _return_to(self, before: PlayedLayout) -> None:
        after, self.played, self._base = self.played, before, None
        if after is not before and self._freezing is not None:
            self._freezing.leave(before, after)

    def _read_into_layout(
        self, path: Path, exchange: StoreExchange
    ) -> tuple[RestorePlan, dict[Key, Tensor]] | str:
        """Read what this worker needs; return the damage if any worker finds some.

        Raises:
            CheckpointError: it does not fit, on some worker.
        """
        played = self.played
        found: list[tuple[RestorePlan, dict[Key, Tensor]]] = []

        def read() -> str:
            try:
                needs = make_restore_plan(
                    open_checkpoint(path),
                    self._outline,
                    played.executor,
                    played.plan,
                    played.layout,
                    self._run(),
                )
                if exchange.rank == 0:
                    check_tensors(needs.spare)
                tensors = read_tensors(needs.locations)
                executor, layout = played.executor, played.layout
                check_states(needs, tensors, executor, layout, self._world)
                found.append((needs, tensors))
            except DamagedError as error:
                return str(error)
            return ""

        damages = _agreed(exchange, f"read {path.name}", read)
        return next((str(x) for x in damages if x), None) or found[0]

    @contextmanager
    def _noted(self, what: str, step: int) -> Iterator[None]:
        self._recorder.begin(what, step)
        try:
            yield
        finally:
            self._recorder.end()

    def _exchange(self) -> StoreExchange:
        """Return an exchange for this save only, since saves overlap with others."""
        self._num_exchanges += 1
        prefix = f"checkpoint {self._num_exchanges}"
        exchange = self._world.exchange
        return StoreExchange(
            dist.PrefixStore(prefix, self.played.executor.store),
            exchange.rank,
            exchange.world_size,
            self._timeout_s,
        )


_HINT: Final = (
    "; with allow_previous=True, the one saved before it would be loaded in its place"
)


def _candidates(
    folder: Path, step: int | str, *, allow_previous: bool
) -> Sequence[str]:
    """Return the checkpoints to try, by name."""
    first: Path | None = None
    try:
        first = find(folder, step)
        check_pointer(first)
    except DamagedError:
        if not allow_previous:
            raise
    paths = [] if first is None else [first]
    if allow_previous:
        paths += previous(folder, first)
    return [path.name for path in paths]


def _agreed(exchange: StoreExchange, name: str, act: Callable[[], Any]) -> list[Any]:
    """Call a function on every worker, and return all results.

    Raises:
        CheckpointError: the first worker's that failed; raised on all workers.
    """
    kind, value = "", None
    try:
        value = act()
    except DamagedError as error:
        kind, value = "damaged", str(error)
    except CheckpointError as error:
        kind, value = "error", str(error)
    results = exchange.gather(name, [kind, value])
    for kind, value in results:
        if kind:
            raise (DamagedError if kind == "damaged" else CheckpointError)(str(value))
    return [value for _, value in results]


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


def _as_json(data: Any) -> Any:
    try:
        return json.loads(json.dumps(data))
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"data= must be JSON, to be saved: {error}") from error
