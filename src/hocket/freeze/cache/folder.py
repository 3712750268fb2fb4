"""The folder of a cache, which holds the outputs of one model."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from pathlib import Path
from typing import Final

from hocket.errors import ConfigError
from hocket.freeze.cache.shard import SUFFIX

ABOUT: Final = "cache.json"
_VERSION: Final = 1


def claim_folder(folder: Path, model: str) -> None:
    """Make a folder for a model's outputs, or check that it is one. Any worker may.

    Args:
        folder: the user's.
        model: a digest of the names and shapes of the model's weights.

    Raises:
        ConfigError: it cannot be made, has other files, or is of another model.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        known = _content(folder)
        if known is None:
            _refuse_other_files(folder)
            _write(folder, {"version": _VERSION, "model": model})
    except OSError as error:
        if error.errno == errno.ENOSPC:  # the cache then says so, when it writes
            return
        raise ConfigError(
            f"the cache's folder {folder} cannot be used "
            f"({error.strerror or error}): give one that can be written"
        ) from error
    if known is not None and known != {"version": _VERSION, "model": model}:
        raise ConfigError(
            f"{folder} is the cache of another model (digest {known.get('model')}, "
            f"version {known.get('version')}; this one has {model}, version "
            f"{_VERSION}): give each model a folder of its own, or delete that one"
        )


def _content(folder: Path) -> dict[str, object] | None:
    """Return what the folder says it is of; None if that is missing or damaged."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        content = json.loads((folder / ABOUT).read_bytes())
        if isinstance(content, dict):
            return content
    return None


def _refuse_other_files(folder: Path) -> None:
    others = sorted(
        path.name
        for path in folder.iterdir()
        if path.suffix != SUFFIX
        and not path.name.startswith(".")
        and path.name != ABOUT
    )
    if others:
        raise ConfigError(
            f"{folder} is no cache: it has {others[0]} and {len(others) - 1} more "
            "files; give an empty folder, or one that does not exist"
        )


def _write(folder: Path, content: dict[str, object]) -> None:
    path = folder / f".{secrets.token_hex(4)}"
    try:
        path.write_text(json.dumps(content))
        os.replace(path, folder / ABOUT)
    finally:
        path.unlink(missing_ok=True)
