"""Writes a checkpoint atomically, together with all workers.

    every worker   its files and its part, synced, into .step-00000120/
                   reports to the others: done, or its error
    the main one   manifest; renames to step-00000120; syncs the folder
                   latest, replaced as a whole; only then are older ones removed
                   reports to the others

Killed anywhere in between, the folder still has the checkpoint before, and `latest`
names it. The next writer removes what is left of the new one.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hocket.errors import CheckpointError
from hocket.run.checkpoint.collect import WorkerShare
from hocket.run.checkpoint.format.durable import (
    remove_folder,
    replace_file,
    sync_folder,
    write_file,
)
from hocket.run.checkpoint.format.folder import (
    LATEST,
    Pointer,
    free_name,
    number_of,
    pointer,
    saved,
)
from hocket.run.checkpoint.format.manifest import (
    MANIFEST,
    MANIFEST_HASH,
    Manifest,
    PartRecord,
    RunRecord,
    WorkerPart,
    to_json,
)
from hocket.run.checkpoint.format.newest import newest
from hocket.run.checkpoint.format.opened import is_whole, read_checkpoint
from hocket.run.checkpoint.format.tensor_file import TensorSource, write_tensors
from hocket.run.cluster.store.store_exchange import StoreExchange
from hocket.version import __version__

log = logging.getLogger(__name__)


def _go_on() -> None:
    """Do nothing: the writing is never stopped."""


@dataclass(frozen=True, slots=True)
class SaveJob:
    """The checkpoint to write, and its folder.

    Args:
        folder: the checkpoints' folder; its lock is held.
        run: the run's record.
        keep: the number of checkpoints to keep.
        wants_more: called now and then; an exception of it ends the writing.
    """

    folder: Path
    run: RunRecord
    keep: int | None
    wants_more: Callable[[], None] = _go_on

    @property
    def temporary(self) -> Path:
        """The folder in which it is written before it is renamed."""
        return self.folder / f".step-{self.run.step:08d}"


def commit(
    job: SaveJob, share: Callable[[], WorkerShare], exchange: StoreExchange
) -> Path:
    """Write a checkpoint together; every worker must call this.

    Args:
        job: the same on all workers.
        share: returns what this worker writes.
        exchange: exchanges values between the workers.

    Returns:
        The path of the complete checkpoint.

    Raises:
        CheckpointError: a worker could not write; raised on all workers, and the files
            are removed.
        WaitError: a worker did not come.
    """
    is_main = exchange.rank == 0
    try:
        results = exchange.gather("part", _attempt(lambda: _write_part(job, share())))
        outcome = _attempt(lambda: _finish(job, results)) if is_main else None
        outcome = exchange.broadcast("checkpoint", outcome)
    except BaseException:
        if is_main:
            remove_folder(job.temporary)
        raise
    if outcome["error"]:
        raise CheckpointError(str(outcome["error"]))
    return job.folder / str(outcome["value"])


def clean(folder: Path) -> None:
    """Remove what killed writers left; the lock must be held."""
    for path in folder.glob(".step-*"):
        remove_folder(path)


def prune(folder: Path, keep: int | None) -> list[str]:
    """Remove all but the newest `keep` checkpoints that are complete.

    The one that `latest` names always stays. A broken one is removed only when `keep`
    complete ones were saved after it.

    Args:
        folder: the checkpoints' folder; only the holder of its lock may call this.
        keep: how many to keep, at least 1; None for all.

    Returns:
        The names of those removed.
    """
    if keep is None:
        return []
    latest = newest(folder)
    removed = []
    num_whole = 0
    for path in saved(folder)[::-1]:
        if num_whole < keep or path == latest:
            num_whole += is_whole(path)
            continue
        retire(path)
        removed.append(path.name)
    if removed:
        log.info("removed older checkpoints: %s", ", ".join(removed))
    return removed


def retire(path: Path) -> None:
    """Remove one checkpoint; it loses its name first."""
    unnamed = path.with_name(f".{path.name}.old")
    remove_folder(unnamed)
    path.rename(unnamed)
    remove_folder(unnamed)


def _attempt(act: Callable[[], str]) -> dict[str, str]:
    """Return a function's result, or its error as text."""
    try:
        return {"value": act(), "error": ""}
    except CheckpointError as error:
        return {"value": "", "error": str(error)}
    except Exception as error:
        log.debug("a checkpoint failed", exc_info=True)
        return {"value": "", "error": f"{type(error).__name__}: {error}"}


def _write_part(job: SaveJob, share: WorkerShare) -> str:
    """Write this worker's part; return the hash of the part's file."""
    temporary = job.temporary
    try:
        temporary.mkdir(exist_ok=True)
        files = []
        for section, tensors in share.tensors.items():
            path = temporary / f"{section.value}-{share.rank}.safetensors"
            sources = {name: TensorSource.of(name, x) for name, x in tensors.items()}
            if sources:
                more = job.wants_more
                files.append(write_tensors(path, section, sources, wants_more=more))
        own = share.updates, share.random, share.extra
        part = WorkerPart(share.rank, share.replica, tuple(files), *own)
        content = to_json(part)
        write_file(temporary / part.name, content)
    except OSError as error:
        raise CheckpointError(_cannot(job, f"rank {share.rank}", error)) from error
    return hashlib.sha256(content).hexdigest()


def _finish(job: SaveJob, results: list[Any]) -> str:
    """Complete the checkpoint, on the main worker, when all parts are on disk."""
    temporary, folder = job.temporary, job.folder
    complete: Path | None = None
    try:
        _raise_first([str(part["error"]) for part in results])
        sha256 = _write_manifest(job, [part["value"] for part in results])
        read_checkpoint(temporary)  # are all workers' parts here, in full length?
        sync_folder(temporary)
        job.wants_more()
        complete = folder / free_name(folder, job.run.step)
        os.rename(temporary, complete)
        sync_folder(folder)
        replace_file(folder / LATEST, Pointer(complete.name, sha256).text.encode())
    except BaseException as error:
        remove_folder(temporary)
        if complete is not None and not _is_latest(complete):
            remove_folder(complete)
        if isinstance(error, OSError):
            raise CheckpointError(_cannot(job, "the main worker", error)) from error
        raise
    _prune(job)
    return complete.name


def _raise_first(errors: list[str]) -> None:
    for error in filter(None, errors):
        raise CheckpointError(error)


def _is_latest(path: Path) -> bool:
    found = pointer(path.parent)
    return found is not None and found.name == path.name


def _cannot(job: SaveJob, worker: str, error: OSError) -> str:
    return (
        f"{worker} cannot write the checkpoint of step {job.run.step} to "
        f"{job.folder.absolute()}: {error.strerror or error}. The older ones are as "
        "they were; make room, and save again"
    )


def _prune(job: SaveJob) -> None:
    try:
        prune(job.folder, job.keep)
    except (OSError, CheckpointError) as error:
        log.warning("older checkpoints in %s stay: %s", job.folder, error)


def _write_manifest(job: SaveJob, hashes: list[str]) -> str:
    """Write the manifest and its hash; return the hash."""
    manifest = Manifest(
        number=1 + max([-1, *map(number_of, saved(job.folder))]),
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        hocket=__version__,
        run=job.run,
        parts=tuple(PartRecord(f"part-{i}.json", x) for i, x in enumerate(hashes)),
    )
    content = to_json(manifest)
    sha256 = hashlib.sha256(content).hexdigest()
    write_file(job.temporary / MANIFEST, content)
    # As `sha256sum --check` reads it.
    line = f"{sha256}  {MANIFEST}\n".encode()
    write_file(job.temporary / MANIFEST_HASH, line)
    return sha256
