"""The code blocks of the documents, and what is done with each kind.

pycon           a session: what it prints is what it shows
python          a program: runs as it stands
py              a fragment of one: its names and arguments exist
sh              commands: run, in a folder with the files that the page names
sh full-size    commands for data or hardware that are not here: read, not run
toml            settings: read
text, bibtex    what is no code
{...}           a directive of Sphinx
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[2]
DOCUMENTS: Final = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
KINDS: Final = frozenset(
    {"pycon", "python", "py", "sh", "sh full-size", "toml", "text", "bibtex"}
)
FENCE: Final = re.compile(r"^```([^`\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A code block.

    Args:
        kind: what stands behind its fence.
        text: what is in it.
        line: of its fence, from 1.
    """

    kind: str
    text: str
    line: int


def name_of(path: Path) -> str:
    """A document's path from the root, as the name of a test's case."""
    return str(path.relative_to(ROOT))


def blocks_in(path: Path) -> Iterator[Block]:
    """All code blocks of a document."""
    text = path.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(found[1].strip(), found[2], line)


def blocks_of(path: Path, *kinds: str) -> Iterator[str]:
    """The texts of a document's blocks of some kinds."""
    return (block.text for block in blocks_in(path) if block.kind in kinds)


def documents_with(*kinds: str) -> list[Any]:
    """The documents that hold blocks of some kinds, as cases for a test."""
    return [
        pytest.param(path, id=name_of(path))
        for path in DOCUMENTS
        if any(blocks_of(path, *kinds))
    ]


def commands_in(text: str) -> Iterator[list[str]]:
    """The words of each command, without comments; lines that go on are joined."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words
