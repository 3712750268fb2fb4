"""Names and sentences are the field's own.

A reader who knows torch.distributed and pipeline papers, and no word of ours, must
understand every name, docstring, comment and message.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

SOURCE: Final = Path(__file__).parents[1] / "src" / "hocket"
FILES: Final = sorted(SOURCE.rglob("*.py"))
ROOMS: Final = sorted({path.relative_to(SOURCE).parts[0] for path in FILES})

# The one list of banned words. Each hides a subject, or is a private word for a term
# that the field has; the right side says what to write.
BANNED: Final = {
    r"likewise": "repeat the word",
    r"who(m)?(so)?ever": "name the subject",
    r"(some|any|every|no)body": "name the subject",
    r"whom": "name the subject",
    r"told|tells?|untold": "broadcast, report, call, return",
    r"lends?|lent|lenders?|borrow(s|ed|ing)?|loans?": "owner, replica of a stale tie",
    r"crews?": "executor",
    r"story": "root cause",
    r"rehears\w+": "dry run",
    r"at hand": "available; of this machine",
    r"stand-ins?": "copies",
    r"anew": "again",
    r"shall": "must",
    r"thaw(s|ed)?": "unfreeze",
    r"(take[ns]?|taking|took) (\w+ )?apart": "split",
    r"halves": "I and W",
    r"gi(ve[ns]?|ving) back": "release",
    r"put off": "deferred",
}
PATTERN: Final = re.compile(
    "|".join(rf"(?P<w{i}>\b(?:{word})\b)" for i, word in enumerate(BANNED)),
    re.IGNORECASE,
)


def files_in(room: str) -> list[Path]:
    """The files of a folder, or the one file of that name."""
    return [path for path in FILES if path.relative_to(SOURCE).parts[0] == room]


def in_room(path: Path) -> str:
    """A file's path below the package."""
    return path.relative_to(SOURCE).as_posix()


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """Every docstring, comment and message of a file, with its line.

    Messages are strings that hold a space: others are keys and names.
    """
    text = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (
            token.type == tokenize.STRING and " " in token.string
        ):
            for i, line in enumerate(token.string.splitlines()):
                # Names in braces, calls and backticks are held by other tests.
                yield token.start[0] + i, re.sub(r"`[^`]*`|\{[^{}]*\}", "", line)


@pytest.mark.parametrize("room", ROOMS)
def test_sentences_use_the_fields_words(room: str) -> None:
    """No docstring, comment or message has a banned word."""
    ways_out = list(BANNED.values())
    found = []
    for path in files_in(room):
        for number, line in sentences(path):
            for match in PATTERN.finditer(line):
                way_out = ways_out[int(str(match.lastgroup)[1:])]
                where = f"{in_room(path)}:{number}"
                found.append(f"{where}: {match.group()!r} -> {way_out}")
    assert not found, "\n".join(found)


def test_every_banned_word_is_found() -> None:
    """The pattern finds a word in a sentence, and leaves others alone."""
    assert PATTERN.search("Somebody told whoever waits")
    assert PATTERN.search("the backward is taken apart")
    assert not PATTERN.search("a stellar toll; the lens of a halved crewless ship")


def test_one_class_name_one_class() -> None:
    """A public class's name names one class in the whole package."""
    places = defaultdict(list)
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(in_room(path))
    several = {name: where for name, where in places.items() if len(where) > 1}
    assert not several


@pytest.mark.parametrize("room", ROOMS)
def test_arguments_are_described_by_what_they_are(room: str) -> None:
    """No argument is described as "of the stage": a description begins with a noun."""
    bare = re.compile(r"^ +(\w+): (of|that|theirs|with which|told)\b", re.MULTILINE)
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef
    found = [
        f"{in_room(path)}: {match.group().strip()}"
        for path in files_in(room)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, kinds)
        for match in bare.finditer(ast.get_docstring(node) or "")
    ]
    assert not found
