"""Recipes as TOML text. Python reads TOML, and does not write it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hocket.core.formats.documents import Key


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
