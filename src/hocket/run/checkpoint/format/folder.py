"""The names in a run's folder of checkpoints, and the content of `latest`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hocket.errors import DamagedError
from hocket.run.checkpoint.format.manifest import MANIFEST

LATEST: Final = "latest"
_NAME: Final = re.compile(r"step-(\d{8,18})(?:\.\d{1,9})?")
_POINTER: Final = re.compile(r"(step-[\d.]{8,30}) ([0-9a-f]{64})\n")


@dataclass(frozen=True, slots=True)
class Pointer:
    """The content of `latest`.

    Args:
        name: the name of the newest complete checkpoint.
        sha256: the hash of its manifest, so that a changed digit does not name another.
    """

    name: str
    sha256: str

    @property
    def text(self) -> str:
        """The file's text."""
        return f"{self.name} {self.sha256}\n"


def pointer(folder: Path) -> Pointer | None:
    """Return the content of `latest`; None if nothing was saved yet.

    Raises:
        DamagedError: it is not what was written.
    """
    path = folder / LATEST
    try:
        content = path.read_bytes()[:200]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error
    found = _POINTER.fullmatch(content.decode(errors="replace"))
    if found is None:
        raise DamagedError(
            f"{path} is damaged: it should name a checkpoint and the hash of its "
            f"manifest. {others(folder)}"
        )
    return Pointer(found[1], found[2])


def saved(folder: Path) -> list[Path]:
    """Return all checkpoints of a folder, in the order in which they were saved.

    Only their names and numbers are read; one whose manifest cannot be read comes
    first.
    """
    found = [path for path in _entries(folder) if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (number_of(path), path.name))


def number_of(path: Path) -> int:
    """Return how many were saved before this one; -1 if its manifest does not say."""
    try:
        number = json.loads((path / MANIFEST).read_bytes())["number"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return -1
    return number if isinstance(number, int) else -1


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name; -1 if it is no such name."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else -1


def free_name(folder: Path, step: int) -> str:
    """Return a name for a new checkpoint: existing ones are never overwritten."""
    name = f"step-{step:08d}"
    taken = {path.name for path in _entries(folder)}
    number = 0
    free = name
    while free in taken:
        number += 1
        free = f"{name}.{number}"
    return free


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def others(folder: Path) -> str:
    """Return the sentence that lists a folder's checkpoints."""
    names = [path.name for path in saved(folder)]
    if not names:
        return f"Nothing was saved in {folder.absolute()}"
    return f"{folder.absolute()} has {', '.join(names[-5:])}: ask for one by its step"
