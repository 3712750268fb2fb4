"""Makes SQuAD's samples: a question, and a window of the paragraph that answers it.

    [CLS] question [SEP] a window of the paragraph [SEP] [PAD]
                           └── stride ──▶ the next window, another sample

    target (start, end)    the pieces with which the answer begins and ends;
                           (0, 0), the [CLS], where the window does not hold all of it

Answers are widened to whole words.

Source: Devlin et al., arXiv:1810.04805, sections 4.2 and 4.3.
"""

from __future__ import annotations

import re
import reprlib
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hocket.core.formats.documents import read_json
from hocket.errors import DataError
from hocket.recipes.data.bert_tokenizer import (
    BertTokenizer,
    batch_of,
    make_tokenizer,
)
from hocket.recipes.data.origin import DataOrigin
from hocket.run.data.samples import EpochRandom

_NUM_AROUND: Final = 3  # [CLS] question [SEP] window [SEP]
SQUAD: Final = DataOrigin(
    "SQuAD",
    "https://rajpurkar.github.io/SQuAD-explorer",
    "a folder with train-v1.1.json and dev-v1.1.json, or the same of v2.0",
)

_HALF_PAIR: Final = re.compile("[\ud800-\udfff]")  # JSON can escape one alone


# Reads SQuAD's JSON, version 1.1 and 2.0, and checks it record by record.
#
#     {"version": "1.1", "data": [{"title": ..., "paragraphs": [
#         {"context": "...", "qas": [{"id": "...", "question": "...",
#                                     "answers": [{"text": "...", "answer_start": 17}],
#                                     "is_impossible": false}]}]}]}
#
# Version 2.0 has questions without an answer: `is_impossible`, and no `answers`.
#
# Source: Rajpurkar et al., arXiv:1606.05250 and arXiv:1806.03822.
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


@dataclass(frozen=True, slots=True)
class TokenizedQuestion:
    """A question and its paragraph in pieces.

    Args:
        pieces: the ids of the question's pieces.
        context: the ids of its paragraph's pieces.
        first: the piece of the context with which the answer begins.
        last: the piece with which it ends; below `first` where there is no answer.
        text: the paragraph.
        places: for each piece of the context, its first character in the text, and the
            one behind it.
        answers: the texts of all its answers; none where there is no answer.
    """

    pieces: Sequence[int]
    context: Sequence[int]
    first: int
    last: int
    text: str
    places: Sequence[tuple[int, int]]
    answers: tuple[str, ...]

    def said(self, first: int, last: int) -> str:
        """Return the words from one piece of the context to another."""
        return self.text[self.places[first][0] : self.places[last][1]]


@dataclass(frozen=True, slots=True)
class Squad:
    """Questions, each with every window of its paragraph.

    Args:
        asked: the questions.
        windows: (N, 2), int64: each sample's question, and the piece of the context
            that its window begins with.
        tokenizer: the tokenizer that made the pieces.
        num_tokens: T of every sample.
        fingerprint: the CRC-32 of file, vocabulary and windows.
    """

    asked: Sequence[TokenizedQuestion]
    windows: Tensor
    tokenizer: BertTokenizer
    num_tokens: int
    fingerprint: int

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.windows)

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> dict[str, Tensor]:
        """`input_ids`, `attention_mask` and `token_type_ids`, each (B, T), int64."""
        del draw
        samples = []
        for question, begin in self.windows[rows].tolist():
            asked = self.asked[question]
            window = asked.context[begin : begin + self.room(asked)]
            samples.append(self.tokenizer.join(asked.pieces, window, self.num_tokens))
        return batch_of(samples)

    def targets(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """(B, 2), int64: the pieces with which the answer begins and ends."""
        del draw
        spans = []
        for question, begin in self.windows[rows].tolist():
            asked = self.asked[question]
            end = begin + self.room(asked)
            offset = window_begin(asked) - begin
            holds = begin <= asked.first <= asked.last < end
            spans.append((asked.first + offset, asked.last + offset) if holds else None)
        return torch.tensor([span or (0, 0) for span in spans])

    def room(self, asked: TokenizedQuestion) -> int:
        """Return the most pieces of the context that are in a question's sample."""
        return self.num_tokens - _NUM_AROUND - len(asked.pieces)


def window_begin(asked: TokenizedQuestion) -> int:
    """Return the place of a window's first piece in its sample."""
    return len(asked.pieces) + 2  # behind [CLS] question [SEP]


def load_squad(
    folder: Path,
    *,
    num_tokens: int = 384,
    num_question_tokens: int = 64,
    stride: int = 128,
    vocabulary: Path | None = None,
    num_entries: int = 30_522,
) -> tuple[Squad, Squad]:
    """Load the questions for training and for evaluation.

    Args:
        folder: the folder with the files of version 1.1 or 2.0.
        num_tokens: T of every sample.
        num_question_tokens: the most pieces of a question; longer ones are cut.
        stride: pieces from the beginning of one window to that of the next.
        vocabulary: a `vocab.txt` of an uncased BERT; one is built from the training
            texts when not given.
        num_entries: the largest size of a vocabulary that is built.

    Raises:
        DataError: a file is missing or malformed, or the numbers leave no room.
    """
    room = num_tokens - _NUM_AROUND - num_question_tokens
    if not 1 <= stride <= room:
        raise DataError(
            f"{num_tokens} tokens, of which {num_question_tokens} are for the question "
            f"and {_NUM_AROUND} for marks, leave windows of {room}: the stride "
            f"{stride} must be from 1 to {room}"
        )
    is_old = (folder / "train-v1.1.json").is_file()
    version = "v1.1" if is_old else "v2.0"
    names = [f"{part}-{version}.json" for part in ("train", "dev")]
    training, evaluation = (read_squad(SQUAD.find(folder, name)) for name in names)
    tokenizer = make_tokenizer(vocabulary, training.texts(), num_entries)
    first, second = (
        _samples(file, tokenizer, num_tokens, num_question_tokens, stride)
        for file in (training, evaluation)
    )
    return first, second


def _samples(
    file: SquadFile,
    tokenizer: BertTokenizer,
    num_tokens: int,
    num_question_tokens: int,
    stride: int,
) -> Squad:
    asked: list[TokenizedQuestion] = []
    for paragraph in file.paragraphs:
        asked += _in_pieces(paragraph, tokenizer, num_question_tokens)
    windows = []
    for number, question in enumerate(asked):
        room = num_tokens - _NUM_AROUND - len(question.pieces)
        begin = 0
        windows.append((number, begin))
        while begin + room < len(question.context):
            begin += stride
            windows.append((number, begin))
    sizes = num_tokens * 1_000_003 + num_question_tokens * 1_009 + stride
    fingerprint = (file.fingerprint ^ tokenizer.fingerprint ^ sizes) & 0xFFFFFFFF
    return Squad(asked, torch.tensor(windows), tokenizer, num_tokens, fingerprint)


def _in_pieces(
    paragraph: Paragraph, tokenizer: BertTokenizer, num_question_tokens: int
) -> list[TokenizedQuestion]:
    """Tokenize a paragraph's questions; all share the pieces of its context."""
    encoding = tokenizer.pieces(paragraph.context)
    context = encoding.ids
    words = range(max((w for w in encoding.word_ids if w is not None), default=-1) + 1)
    characters = [encoding.word_to_chars(word) or (0, 0) for word in words]
    begins, ends = ([place[side] for place in characters] for side in (0, 1))
    pieces_of = [encoding.word_to_tokens(word) or (0, 0) for word in words]
    asked = []
    for question in paragraph.questions:
        pieces = tokenizer.pieces(question.text).ids[:num_question_tokens]
        # The first word that ends behind the answer's begin, the last that begins
        # before its end; none of both where there is no answer.
        word_first = bisect_right(ends, question.begin)
        word_last = bisect_right(begins, question.end - 1) - 1
        first, behind = 0, 0
        if question.end and word_first <= word_last:
            first, behind = pieces_of[word_first][0], pieces_of[word_last][1]
        asked.append(
            TokenizedQuestion(
                pieces,
                context,
                first,
                behind - 1,
                paragraph.context,
                encoding.offsets,
                question.answers,
            )
        )
    return asked
