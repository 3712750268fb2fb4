"""What a recipe's file may reach: what lies beside it, and nothing else unasked.

Recipes are passed on. One that comes from somebody else must not read files, write
folders or import modules elsewhere on this machine by what it says, such as

    data.path = "../../.ssh/id_rsa"    run.folder = "/etc"    model.function = "os:..."

What the user says on the command line may name anything, and `--allow-outside` lets a
recipe's file do so too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hocket.recipes.config.toml_text import Key

READ: Final[tuple[Key, ...]] = (  # relative to the recipe's folder
    ("data", "path"),
    ("data", "vocabulary"),
    ("model", "pretrained"),
    ("checkpoint", "resume"),
)
WRITTEN: Final[tuple[Key, ...]] = (  # relative to the current folder
    ("run", "folder"),
    ("run", "profile_folder"),
)
IMPORTED: Final[tuple[Key, ...]] = (
    ("model", "function"),
    ("data", "function"),
    ("task", "loss"),
    ("task", "metrics"),
    ("run", "callbacks"),
)
NO_PATHS: Final = {"resume": "auto"}  # values that are words

_WAY_OUT: Final = (
    "say it on the command line (--set {key}=...), or allow it (--allow-outside)"
)


def make_absolute(sections: Mapping[str, Any], folder: Path) -> None:
    """Let the paths that a recipe reads mean the same file from every folder."""
    for (section, name), path in _said(sections, READ):
        full = _full(path, folder)
        if NO_PATHS.get(name) != path and full is not None:
            sections[section][name] = str(full)


def outside_paths(
    sections: Mapping[str, Any], folder: Path
) -> Iterator[tuple[Key, str]]:
    """What a recipe's file names elsewhere: its key, and a sentence about it.

    Args:
        sections: as the file says them.
        folder: that the file is in.
    """
    for keys, base, whose in (
        (READ, folder, "the recipe's folder"),
        (WRITTEN, Path.cwd(), "the current folder"),
    ):
        for key, path in _said(sections, keys):
            if NO_PATHS.get(key[1]) != path and not _is_inside(path, base):
                yield key, f"{path!r} is outside of {whose} {base}: {_way_out(key)}"
    for key, name in _said(sections, IMPORTED):
        module = name.partition(":")[0]
        if not _is_beside(module, folder):
            yield (
                key,
                f"the module {module!r} is not in the recipe's folder {folder}: "
                f"{_way_out(key)}",
            )


def functions_in(sections: Mapping[str, Any]) -> set[Key]:
    """The keys that name functions of the user's."""
    return {key for key, _ in _said(sections, IMPORTED)}


def _said(
    sections: Mapping[str, Any], keys: tuple[Key, ...]
) -> Iterator[tuple[Key, str]]:
    """The strings that are there under some keys; lists one by one."""
    for section, name in keys:
        values = sections.get(section)
        value = values.get(name) if isinstance(values, dict) else None
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str):
                yield (section, name), one


def _is_inside(path: str, folder: Path) -> bool:
    """Whether a path stays in a folder, also where it leads over links."""
    full = _full(path, folder)
    return full is not None and full.is_relative_to(folder.resolve())


def _full(path: str, folder: Path) -> Path | None:
    """Where a path leads; nothing for one that leads nowhere."""
    try:
        return (folder / Path(path).expanduser()).resolve()
    except (OSError, RuntimeError, ValueError):  # a loop, nobody's home, a NUL
        return None


def _is_beside(module: str, folder: Path) -> bool:
    """Whether a module's file is in a folder, and not hidden by one that is loaded."""
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
