"""Reads SQuAD's JSON, version 1.1 and 2.0, and checks it record by record.

    {"version": "1.1", "data": [{"title": ..., "paragraphs": [
        {"context": "...", "qas": [{"id": "...", "question": "...",
                                    "answers": [{"text": "...", "answer_start": 17}],
                                    "is_impossible": false}]}]}]}

Version 2.0 has questions without an answer: `is_impossible`, and no `answers`.

Source: Rajpurkar et al., arXiv:1606.05250 and arXiv:1806.03822.
"""

from __future__ import annotations

import re
import reprlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hocket.core.formats.documents import read_json
from hocket.errors import DataError
from hocket.recipes.data.origin import DataOrigin

SQUAD: Final = DataOrigin(
    "SQuAD",
    "https://rajpurkar.github.io/SQuAD-explorer",
    "a folder with train-v1.1.json and dev-v1.1.json, or the same of v2.0",
)

_HALF_PAIR: Final = re.compile("[\ud800-\udfff]")  # JSON can escape one alone


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a paragraph.

    Args:
        text: the question.
        begin: the first character of its first answer in the paragraph.
        end: the character after its last one; 0 where there is no answer.
        answers: the texts of all its answers, of which any is right.
    """

    text: str
    begin: int
    end: int
    answers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A text and the questions about it."""

    context: str
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class SquadFile:
    """The content of a file.

    Args:
        paragraphs: the paragraphs, in the file's order.
        fingerprint: the CRC-32 of its bytes.
    """

    paragraphs: tuple[Paragraph, ...]
    fingerprint: int

    def texts(self) -> Iterator[str]:
        """Yield all texts, to build a vocabulary from."""
        for paragraph in self.paragraphs:
            yield paragraph.context
            for question in paragraph.questions:
                yield question.text


def read_squad(path: Path) -> SquadFile:
    """Read a file.

    Raises:
        DataError: it is missing or malformed; names the line or the record.
    """
    text = SQUAD.text(path)
    try:
        content = read_json(text)
    except ValueError as error:
        raise DataError(f"{path}: no JSON ({error}). {SQUAD.advice}") from error
    paragraphs = tuple(_paragraphs(_Record(path, "the file", content)))
    if not any(paragraph.questions for paragraph in paragraphs):
        raise DataError(f"{path} has no question: {SQUAD.advice}")
    return SquadFile(paragraphs, zlib.crc32(SQUAD.read(path)))


@dataclass(frozen=True, slots=True)
class _Record:
    """A part of the file, and its place there."""

    path: Path
    where: str
    content: Any

    def get(self, key: str, kind: type) -> Any:
        """Return a value that must exist and be of this kind."""
        if not isinstance(self.content, dict) or key not in self.content:
            raise self.fault(f"has no {key!r}")
        value = self.content[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.fault(
                f"has {key!r} {reprlib.repr(value)}, where a {kind.__name__} is due"
            )
        if isinstance(value, str) and _HALF_PAIR.search(value):
            raise self.fault(f"has {key!r} {reprlib.repr(value)}, which is no Unicode")
        return value

    def each(self, key: str) -> Iterator[_Record]:
        """Yield the parts of a list that must exist."""
        for i, value in enumerate(self.get(key, list)):
            where = (
                f"{key}[{i}]"
                if self.where == "the file"
                else (f"{self.where}.{key}[{i}]")
            )
            yield _Record(self.path, where, value)

    def fault(self, what: str) -> DataError:
        return DataError(f"{self.path}, {self.where} {what}. {SQUAD.advice}")


def _paragraphs(file: _Record) -> Iterator[Paragraph]:
    for article in file.each("data"):
        for record in article.each("paragraphs"):
            context = record.get("context", str)
            questions = tuple(_question(qa, context) for qa in record.each("qas"))
            yield Paragraph(context, questions)


def _question(record: _Record, context: str) -> Question:
    text = record.get("question", str)
    if record.content.get("is_impossible", False) is True:
        return Question(text, 0, 0)
    answer = next(record.each("answers"), None)
    if answer is None:
        raise record.fault("has no answer, and 'is_impossible' does not say so")
    words, begin = answer.get("text", str), answer.get("answer_start", int)
    if not words or begin < 0 or not context.startswith(words, begin):
        found = context[max(0, begin) : max(0, begin) + len(words)]
        raise answer.fault(
            f"should be {words!r:.60} at character {reprlib.repr(begin)}, where the "
            f"context has {found!r:.60}"
        )
    answers = tuple(each.get("text", str) for each in record.each("answers"))
    return Question(text, begin, begin + len(words), answers)
