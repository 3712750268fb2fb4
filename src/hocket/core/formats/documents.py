"""Reads JSON and TOML, so that every fault is a ValueError that names its line.

Python's own readers raise RecursionError for deep nesting, and name no place where an
integer has too many digits or a document ends too early.
"""

from __future__ import annotations

import json
import re
import tomllib
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from hocket.errors import ParseError

Key = tuple[str, ...]  # ("training", "seed") is training.seed

_SECTION: Final = re.compile(r"\s*\[([^\[\]]+)\]")
_ENTRY: Final = re.compile(r"\s*([A-Za-z0-9_.\"' -]+?)\s*=")
_T = TypeVar("_T")


def read_json(text: str) -> Any:  # noqa: ANN401  (JSON is anything)
    """Read JSON.

    Raises:
        ValueError: it is not JSON, or nested too deeply; names the line.
    """
    return _read(text, json.loads, json.JSONDecodeError)


def read_toml(text: str) -> dict[str, Any]:
    """Read TOML.

    Raises:
        ValueError: it is not TOML, or nested too deeply; names the line.
    """
    return _read(text, tomllib.loads, tomllib.TOMLDecodeError)


def read_text(path: Path) -> str:
    """Read the text of a file.

    Raises:
        ParseError: it cannot be opened or read, with the reason; or it is not text,
            with the line.
    """
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: no path at all ("a\0b")
        reason = getattr(error, "strerror", None) or error
        raise ParseError(f"{path}: cannot be read: {reason}") from None
    try:
        return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ParseError(
            f"{path}, line {line}: is not text in UTF-8 (byte {error.start})"
        ) from None


def lines_of_keys(text: str) -> dict[Key, int]:
    """The line, from 1, that says each key of TOML or opens each section.

    Reads one entry per line, as recipes are written. In other TOML (multi-line strings,
    inline tables) it may miss a key, and then an error names the file without a line.
    """
    lines: dict[Key, int] = {}
    section: Key = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if opened := _SECTION.match(line):
            section = _parts(opened[1])
            lines.setdefault(section, number)
        elif entry := _ENTRY.match(line):
            lines.setdefault(section + _parts(entry[1]), number)
    return lines


def _parts(name: str) -> Key:
    return tuple(part.strip(" \"'") for part in name.split("."))


def _read(text: str, read: Callable[[str], _T], usual: type[ValueError]) -> _T:
    """Call a reader, and name the line of any fault."""
    try:
        return read(text)
    except (ValueError, RecursionError) as error:
        fault = error
    lines = text.splitlines(keepends=True)
    words = str(fault)
    if type(fault) is not usual:
        prefixes = ["".join(lines[:number]) for number in range(1, len(lines))]
        fails = partial(_fails, read, type(fault))
        words += f" (line {1 + bisect_left(prefixes, True, key=fails)})"
    elif not re.search(r"line \d", words):
        words += f" (line {max(1, len(lines))})"
    raise ValueError(words) from fault


def _fails(read: Callable[[str], object], kind: type[Exception], text: str) -> bool:
    """Return whether a reader fails with just this kind of error."""
    try:
        read(text)
    except (ValueError, RecursionError) as error:
        return type(error) is kind
    return False
