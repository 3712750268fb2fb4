"""Recipes as TOML text: read and write one, and find the line that says a key.

Python reads TOML and does not write it, and its reader forgets where a key stood.
"""

from __future__ import annotations

import json
import re
import tomllib
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

Key = tuple[str, ...]  # ("training", "seed") is training.seed

_SECTION: Final = re.compile(r"\s*\[([^\[\]]+)\]")
_ENTRY: Final = re.compile(r"\s*([A-Za-z0-9_.\"' -]+?)\s*=")


def dotted(key: Key) -> str:
    """The key as people write it: `training.seed`."""
    return ".".join(key)


def to_toml(
    sections: Mapping[str, Mapping[str, Any]], origins: Mapping[Key, str]
) -> str:
    """Sections of plain values as TOML, each key with where its value is from.

    TOML knows no None: keys without a value are left out.
    """
    lines: list[str] = []
    for section, values in sections.items():
        lines += ["", f"[{section}]"]
        lines += [
            f"{name} = {_value(value)}{_comment(origins.get((section, name)))}"
            for name, value in values.items()
            if value is not None
        ]
    return "\n".join([*lines[1:], ""])


def parse(text: str) -> dict[str, Any]:
    """Read TOML.

    Raises:
        ValueError: it is not TOML, or nested too deeply; names the line.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        fault = error
    lines = text.splitlines(keepends=True)
    prefixes = ["".join(lines[:number]) for number in range(1, len(lines))]
    line = 1 + bisect_left(prefixes, True, key=partial(_fails, kind=type(fault)))
    raise ValueError(f"{fault} (at line {line})") from fault


def _fails(text: str, kind: type[Exception]) -> bool:
    """Return whether reading fails with just this kind of error."""
    try:
        tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        return type(error) is kind
    return False


def large_integers(sections: Mapping[str, Any]) -> Iterator[Key]:
    """Yield each key whose value has an integer of more than 64 bits."""
    for section, values in sections.items():
        if not isinstance(values, dict):
            if _is_large(values):
                yield (section,)
            continue
        for name, value in values.items():
            if _is_large(value):
                yield section, name


def _is_large(value: Any) -> bool:
    match value:
        case int():
            return not -(2**63) <= value < 2**63
        case list():
            return any(map(_is_large, value))
        case dict():
            return any(map(_is_large, value.values()))
        case _:
            return False


def lines_of_keys(text: str) -> dict[Key, int]:
    """The line, from 1, that says each key or opens each section.

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


def _value(value: Any) -> str:
    """A TOML value. JSON's strings, numbers, truths and lists are TOML's as well."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        pairs = (f"{_value(name)} = {_value(one)}" for name, one in value.items())
        return f"{{{', '.join(pairs)}}}"
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")


def _comment(origin: str | None) -> str:
    return f"  # {origin}" if origin else ""
