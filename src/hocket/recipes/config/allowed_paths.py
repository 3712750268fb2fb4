"""Restricts a recipe's file to paths and modules in its own folder.

Recipes are shared. A recipe by another author must not read files, write folders or
import modules elsewhere on this machine, such as

    data.path = "../../.ssh/id_rsa"    run.folder = "/etc"    model.function = "os:..."

Settings on the command line may name any path or module, and `--allow-outside` lets a
recipe's file do so, too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hocket.core.formats.documents import Key

READ: Final[tuple[Key, ...]] = (  # relative to the recipe's folder
    ("data", "path"),
    ("data", "vocabulary"),
    ("model", "pretrained"),
    ("teacher", "weights"),
    ("teacher_model", "pretrained"),
    ("checkpoint", "resume"),
)
WRITTEN: Final[tuple[Key, ...]] = (  # relative to the current folder
    ("run", "folder"),
    ("run", "profile_folder"),
    ("cache", "folder"),
)
IMPORTED: Final[tuple[Key, ...]] = (
    ("model", "function"),
    ("teacher_model", "function"),
    ("data", "function"),
    ("task", "loss"),
    ("task", "metrics"),
    ("run", "callbacks"),
    ("run", "loggers"),
)
NO_PATHS: Final = {"resume": "auto", "loggers": "tensorboard"}  # values: words

_WAY_OUT: Final = (
    "say it on the command line (--set {key}=...), or allow it (--allow-outside)"
)


def make_absolute(sections: Mapping[str, Any], folder: Path) -> None:
    """Make the paths that a recipe reads absolute."""
    for (section, name), path in _said(sections, READ):
        full = _full(path, folder)
        if NO_PATHS.get(name) != path and full is not None:
            sections[section][name] = str(full)


def outside_paths(
    sections: Mapping[str, Any], folder: Path
) -> Iterator[tuple[Key, str]]:
    """Yield each key whose path or module is outside, with an error sentence.

    Args:
        sections: the file's sections.
        folder: the file's folder.
    """
    for keys, base, whose in (
        (READ, folder, "the recipe's folder"),
        (WRITTEN, Path.cwd(), "the current folder"),
    ):
        for key, path in _said(sections, keys):
            if NO_PATHS.get(key[1]) != path and not _is_inside(path, base):
                yield key, f"{path!r} is outside of {whose} {base}: {_way_out(key)}"
    for key, name in _imported(sections):
        module = name.partition(":")[0]
        if not _is_beside(module, folder):
            yield (
                key,
                f"the module {module!r} is not in the recipe's folder {folder}: "
                f"{_way_out(key)}",
            )


def functions_in(sections: Mapping[str, Any]) -> set[Key]:
    """Return the keys that name the user's functions."""
    return {key for key, _ in _imported(sections)}


def _imported(sections: Mapping[str, Any]) -> Iterator[tuple[Key, str]]:
    """Yield each name of a function, under its key."""
    for key, name in _said(sections, IMPORTED):
        if NO_PATHS.get(key[1]) != name:
            yield key, name


def _said(
    sections: Mapping[str, Any], keys: tuple[Key, ...]
) -> Iterator[tuple[Key, str]]:
    """Yield the strings under these keys; a list's entries one by one."""
    for section, name in keys:
        values = sections.get(section)
        value = values.get(name) if isinstance(values, dict) else None
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str):
                yield (section, name), one


def _is_inside(path: str, folder: Path) -> bool:
    """Return whether a path is in a folder after links are resolved."""
    full = _full(path, folder)
    return full is not None and full.is_relative_to(folder.resolve())


def _full(path: str, folder: Path) -> Path | None:
    """Resolve a path; None if it cannot be resolved."""
    try:
        return (folder / Path(path).expanduser()).resolve()
    except (OSError, RuntimeError, ValueError):  # a loop, an unknown user, a NUL
        return None


def _is_beside(module: str, folder: Path) -> bool:
    """Return whether a module's file is in a folder, and no loaded module hides it."""
    top, *_ = parts = module.split(".")
    if top in sys.stdlib_module_names or top == "hocket":
        return False
    path = folder.joinpath(*parts)
    files = [path.with_suffix(".py"), path / "__init__.py"]
    if not any(file.is_file() and _is_inside(str(file), folder) for file in files):
        return False
    loaded = getattr(sys.modules.get(top), "__file__", None)
    return loaded is None or _is_inside(loaded, folder)


def _way_out(key: Key) -> str:
    return _WAY_OUT.format(key=".".join(key))
