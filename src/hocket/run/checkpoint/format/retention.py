"""Removes old checkpoints: the newest complete ones stay."""

from __future__ import annotations

import logging
from pathlib import Path

from hocket.run.checkpoint.format.durable import remove_folder
from hocket.run.checkpoint.format.folder import saved
from hocket.run.checkpoint.format.newest import newest
from hocket.run.checkpoint.format.verify import is_whole

log = logging.getLogger(__name__)


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
