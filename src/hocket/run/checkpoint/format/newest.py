"""Finds the checkpoint that is asked for in a run's folder."""

from __future__ import annotations

import logging
from pathlib import Path

from hocket.errors import CheckpointError, DamagedError
from hocket.run.checkpoint.format.folder import LATEST, others, pointer, saved, step_of

log = logging.getLogger(__name__)


def newest(folder: str | Path) -> Path | None:
    """Return the newest complete checkpoint of a folder; None if there is none yet.

    For runs that may be started again: load it if it is there. Without `latest`, as
    when a crash or a partial copy lost it, the newest complete one is found by the
    order of saving, and a warning is logged.

    Raises:
        DamagedError: `latest` is not what was written, or what it names is gone; or it
            is missing, and no checkpoint there is complete.
    """
    folder = Path(folder)
    found = pointer(folder)
    if found is None:
        return _newest_without_pointer(folder)
    if not (folder / found.name).is_dir():
        raise DamagedError(
            f"{folder / LATEST} names {found.name}, which is not there. "
            f"{others(folder)}"
        )
    return folder / found.name


def _newest_without_pointer(folder: Path) -> Path | None:
    every = saved(folder)[::-1]
    if not every:
        return None
    from hocket.run.checkpoint.format.opened import is_whole  # imports torch

    found = next(filter(is_whole, every), None)
    if found is None:
        raise DamagedError(
            f"{folder / LATEST} is missing, and none of the {len(every)} checkpoints "
            f"beside it is complete ({every[0].name}, ...): restore them from a copy, "
            "or move them away to begin at step 0"
        )
    log.warning(
        "%s is missing: taking %s, the newest complete of %d checkpoints there",
        folder / LATEST,
        found.name,
        len(every),
    )
    return found


def find(folder: Path, step: int | str) -> Path:
    """Return the checkpoint that the user asks for.

    Args:
        folder: the folder of all checkpoints.
        step: "latest", or a number of steps; the last one saved if several have it.

    Raises:
        CheckpointError: there is none; lists those that there are.
        DamagedError: `latest` is not what was written.
    """
    if step == LATEST:
        found = newest(folder)
        if found is None:
            raise CheckpointError(f"no checkpoint in {folder}. {others(folder)}")
        return found
    if not isinstance(step, int):
        raise CheckpointError(f"step={step!r}: 'latest', or a number of steps")
    matching = [path for path in saved(folder) if step_of(path) == step]
    if not matching:
        raise CheckpointError(f"no checkpoint of step {step}. {others(folder)}")
    return matching[-1]


def previous(folder: Path, than: Path | None) -> list[Path]:
    """Return those saved before one, newest first; all if that one is None."""
    every = saved(folder)[::-1]
    return every[every.index(than) + 1 :] if than in every else every
