"""Turns the library's docstrings into Markdown that MyST reads.

Sum up.                       Sum up.

Args:                         :param rows: what is summed up.
rows: what is summed up.

>>> print(total([1, 2]))      ```pycon
3                             >>> print(total([1, 2]))
3
```
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

# A section of a docstring, and the field that each of its entries becomes.
FIELDS: Final = {
    "Args": "param",
    "Attributes": "var",
    "Raises": "raises",
    "Warns": "raises",
}
HEAD: Final = re.compile(r"^(Args|Attributes|Raises|Returns|Yields|Warns):$")
ENTRY: Final = re.compile(r"^    (\*{0,2}[\w., |]+?): (.*)$")
NAME: Final = re.compile(r"`(?:hocket\.)?([A-Za-z_][\w.]*)`")
ARXIV: Final = re.compile(r"\barXiv:(\d{4}\.\d{5})")
DOI: Final = re.compile(r"\bdoi (10\.\d+/[\w.]*\w)")


def markdown_of(docstring: str, names: frozenset[str]) -> str:
    """A docstring as Markdown, with links to public names and papers.

    Args:
        docstring: as `inspect.getdoc` returns it.
        names: the public names, without `hocket.`.
    """
    blocks, lines = [], docstring.splitlines()
    while lines:
        head = HEAD.match(lines[0])
        end = _end_of_section(lines) if head else _end_of_text(lines)
        part, lines = lines[:end], lines[end:]
        if head is None:
            blocks.append("\n".join(_text(part, names)))
        else:
            blocks.append(_section(head[1], part[1:], names))
    return "\n\n".join(block for block in blocks if block.strip())


def linked(text: str, names: frozenset[str]) -> str:
    """A text in which public names in backticks, and papers, are links."""

    def link(match: re.Match[str]) -> str:
        name = match[1]
        if name.partition(".")[0] not in names:
            return match[0]
        return f"{{py:obj}}`{name} <hocket.{name}>`"

    text = ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
    text = DOI.sub(r"[doi \1](https://doi.org/\1)", text)
    return NAME.sub(link, text)


def _end_of_section(lines: list[str]) -> int:
    """How many lines a section has: its head, and what is indented below it."""
    for i, line in enumerate(lines[1:], 1):
        if line and not line.startswith(" "):
            return i
    return len(lines)


def _end_of_text(lines: list[str]) -> int:
    """How many lines come before the next section."""
    for i, line in enumerate(lines[1:], 1):
        if HEAD.match(line):
            return i
    return len(lines)


def _text(lines: list[str], names: frozenset[str]) -> Iterator[str]:
    """Paragraphs, with links; pictures and sessions letter by letter."""
    is_session = False
    for line in lines:
        if line.startswith(">>>") and not is_session:
            is_session = True
            yield "```pycon"
        if is_session and not line:
            is_session = False
            yield "```"
        if is_session:
            yield line.partition("  # doctest:")[0]
        elif line.startswith("    "):
            yield line
        else:
            yield linked(line, names)
    if is_session:
        yield "```"


def _section(head: str, lines: list[str], names: frozenset[str]) -> str:
    """A section as fields: one for each entry, or one for the whole of it."""
    if head not in FIELDS:
        return f":returns: {linked(_joined(lines), names)}"
    entries: list[tuple[str, list[str]]] = []
    for line in lines:
        found = ENTRY.match(line)
        if found:
            entries.append((found[1], [found[2]]))
        elif entries:
            entries[-1][1].append(line)
    return "\n".join(
        f":{FIELDS[head]} {one}: {linked(_joined(said), names)}"
        for names_of_one, said in entries
        for one in names_of_one.split(", ")
    )


def _joined(lines: list[str]) -> str:
    """Lines of one entry as one line."""
    return " ".join(line.strip() for line in lines if line.strip())
