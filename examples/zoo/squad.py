"""SQuAD: a question, a window of the paragraph that answers it, official scores.

    [CLS] question [SEP] a window of the paragraph [SEP] [PAD]
                           └── stride ──▶ the next window, another sample

    target (start, end)    the pieces with which the answer begins and ends;
                           (0, 0), the [CLS], where the window does not hold all of it

Answers are widened to whole words. A question's answer is the best span over all of its
windows.

Source: Rajpurkar et al., arXiv:1606.05250 and arXiv:1806.03822 (version 2.0, some of
whose questions have no answer); Devlin et al., arXiv:1810.04805, section 4.2; the
official evaluate-v1.1.py and evaluate-v2.0.py.
"""

from __future__ import annotations

import json
import re
import string
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from examples.zoo.word_pieces import WordPieces, read_text, word_pieces
from hocket.errors import DataError
from hocket.run.data.samples import EpochRandom

_ADVICE: Final = (
    "get version 1.1 or 2.0 from https://rajpurkar.github.io/SQuAD-explorer"
)
_NUM_AROUND: Final = 3  # [CLS] question [SEP] window [SEP]
_MOST_PIECES: Final = 30  # of an answer, as in BERT's own script
_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a paragraph.

    Args:
        text: the question.
        context: the paragraph.
        begin: the first character of its first answer in the paragraph.
        end: the character behind it; 0 where there is no answer.
        answers: the texts of all its answers, of which any is right.
    """

    text: str
    context: str
    begin: int
    end: int
    answers: tuple[str, ...]


def read(path: Path) -> list[Question]:
    """Read a file's questions.

    Raises:
        DataError: it is missing or malformed.
    """
    text = read_text(path, _ADVICE)
    try:
        found = [
            _question(record, paragraph["context"])
            for article in json.loads(text)["data"]
            for paragraph in article["paragraphs"]
            for record in paragraph["qas"]
        ]
        if not found:
            raise _NoQuestionError
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise DataError(
            f"{path} is no file of SQuAD ({type(error).__name__}: {error}): {_ADVICE}"
        ) from error
    return found


class _NoQuestionError(ValueError):
    """A file without any question."""


def _question(record: Any, context: str) -> Question:
    for text in (context, record["question"]):
        text.encode()  # JSON can escape half a character
    answers = record["answers"]
    if record.get("is_impossible") is True:
        return Question(record["question"], context, 0, 0, ())
    words, begin = answers[0]["text"], answers[0]["answer_start"]
    if not words or begin < 0 or not context.startswith(words, begin):
        raise ValueError(f"{words!r:.60} is not at character {begin} of its context")
    texts = tuple(answer["text"] for answer in answers)
    return Question(record["question"], context, begin, begin + len(words), texts)


@dataclass(frozen=True, slots=True)
class Asked:
    """A question and its paragraph in pieces.

    Args:
        question: the question.
        pieces: the ids of its pieces.
        context: the ids of its paragraph's pieces.
        places: for each of those its first character, and the one behind it.
        first: the piece with which the answer begins.
        last: the piece with which it ends; below `first` where there is no answer.
    """

    question: Question
    pieces: Sequence[int]
    context: Sequence[int]
    places: Sequence[tuple[int, int]]
    first: int
    last: int

    def said(self, first: int, last: int) -> str:
        """Return the words from one piece of the paragraph to another."""
        return self.question.context[self.places[first][0] : self.places[last][1]]


@dataclass(frozen=True, slots=True)
class Squad:
    """Questions, each with every window of its paragraph.

    Args:
        asked: the questions.
        windows: (N, 2), int64: each sample's question, and the piece of the paragraph
            that its window begins with.
        words: the vocabulary.
        num_tokens: T of every sample.
        fingerprint: the CRC-32 of questions, vocabulary and windows.
        head: what a BERT has at its end.
    """

    asked: Sequence[Asked]
    windows: Tensor
    words: WordPieces
    num_tokens: int
    fingerprint: int
    head: str = "spans"

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.windows)

    @property
    def num_pieces(self) -> int:
        """The size of the vocabulary."""
        return self.words.num_entries

    def room(self, asked: Asked) -> int:
        """Return the most pieces of the paragraph that are in a question's sample."""
        return self.num_tokens - _NUM_AROUND - len(asked.pieces)

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> dict[str, Tensor]:
        """`input_ids`, `attention_mask` and `token_type_ids`, each (B, T), int64."""
        del draw
        pairs = []
        for number, begin in self.windows[rows].tolist():
            asked = self.asked[number]
            window = asked.context[begin : begin + self.room(asked)]
            pairs.append((asked.pieces, window))
        return self.words.batch(pairs, self.num_tokens)

    def targets(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """(B, 2), int64: the pieces with which the answer begins and ends."""
        del draw
        spans = []
        for number, begin in self.windows[rows].tolist():
            asked = self.asked[number]
            end, offset = begin + self.room(asked), len(asked.pieces) + 2 - begin
            holds = begin <= asked.first <= asked.last < end
            spans.append(
                [asked.first + offset, asked.last + offset] if holds else [0, 0]
            )
        return torch.tensor(spans)


def squad(
    path: str,
    num_tokens: int = 384,
    num_question_tokens: int = 64,
    stride: int = 128,
    vocabulary: str | None = None,
    num_pieces: int = 30_522,
) -> tuple[Squad, Squad]:
    """Load the questions for training and for evaluation.

    Args:
        path: a folder with train-v1.1.json and dev-v1.1.json, or the same of v2.0.
        num_tokens: T of every sample.
        num_question_tokens: the most pieces of a question; longer ones are cut.
        stride: pieces from the beginning of one window to that of the next.
        vocabulary: a `vocab.txt` of an uncased BERT; one is built from the training
            texts where it is not said.
        num_pieces: the largest size of a vocabulary that is built.

    Raises:
        DataError: a file is missing or malformed, or the numbers leave no room.
    """
    room = num_tokens - _NUM_AROUND - num_question_tokens
    if not 1 <= stride <= room:
        raise DataError(
            f"data.stride {stride}: num_tokens {num_tokens} less num_question_tokens "
            f"{num_question_tokens} and {_NUM_AROUND} marks leave windows of {room}"
        )
    version = "v1.1" if Path(path, "train-v1.1.json").is_file() else "v2.0"
    parts = [read(Path(path, f"{part}-{version}.json")) for part in ("train", "dev")]
    words = word_pieces(vocabulary, _texts(parts[0]), num_pieces)
    first, second = (
        _samples(part, words, num_tokens, num_question_tokens, stride) for part in parts
    )
    return first, second


def _texts(questions: Sequence[Question]) -> Iterator[str]:
    """Yield each paragraph, and the questions about it."""
    context = None
    for question in questions:
        if question.context is not context:
            context = question.context
            yield context
        yield question.text


def _samples(
    questions: Sequence[Question],
    words: WordPieces,
    num_tokens: int,
    num_question_tokens: int,
    stride: int,
) -> Squad:
    asked, windows, context, encoding = list[Asked](), [], "", words.pieces("")
    for number, question in enumerate(questions):
        if question.context is not context:
            context = question.context
            encoding = words.pieces(context)
        pieces = words.pieces(question.text).ids[:num_question_tokens]
        span = _span(question, encoding)
        asked.append(Asked(question, pieces, encoding.ids, encoding.offsets, *span))
        room = num_tokens - _NUM_AROUND - len(pieces)
        num_more = max(0, -(-(len(encoding.ids) - room) // stride))
        windows += [(number, stride * i) for i in range(num_more + 1)]
    sizes = (num_tokens, num_question_tokens, stride)
    digest = zlib.crc32(repr((questions, sizes)).encode(), words.fingerprint)
    return Squad(asked, torch.tensor(windows), words, num_tokens, digest)


def _span(question: Question, encoding: Any) -> tuple[int, int]:
    """Return the first piece of the answer's first word, and the last of its last.

    The first word ends behind the answer's begin, the last begins before its end.
    """
    num_words = 1 + max((x for x in encoding.word_ids if x is not None), default=-1)
    places = [encoding.word_to_chars(word) or (0, 0) for word in range(num_words)]
    first = bisect_right(places, question.begin, key=lambda x: x[1])
    last = bisect_right(places, question.end - 1, key=lambda x: x[0]) - 1
    if not question.end or first > last:
        return 0, -1
    return encoding.word_to_tokens(first)[0], encoding.word_to_tokens(last)[1] - 1


def loss(output: Any, place_B2: Tensor) -> Tensor:
    """Return the mean of two cross-entropies, of a span's first and last piece.

    Args:
        output: has `start_logits` and `end_logits`, each (B, T).
        place_B2: the places of both pieces, 0 to T - 1.
    """
    first = functional.cross_entropy(output["start_logits"], place_B2[:, 0])
    return (first + functional.cross_entropy(output["end_logits"], place_B2[:, 1])) / 2


def evaluate(outputs: Any, samples: Squad) -> dict[str, float]:
    """Return F1 and exact match of the answers to all questions.

    Args:
        outputs: `start_logits` and `end_logits` of the first windows, on the CPU.
        samples: the windows.
    """
    found = answers(samples, outputs["start_logits"], outputs["end_logits"])
    pairs = [(text, samples.asked[row].question.answers) for row, text in found.items()]
    return {
        "f1": fmean(f1(*pair) for pair in pairs),
        "exact_match": fmean(exact_match(*pair) for pair in pairs),
    }


def answers(samples: Squad, start_NT: Tensor, end_NT: Tensor) -> dict[int, str]:
    """Return the words of the best span for each question, over its windows.

    Where some questions of the file have no answer, none is given if the score of the
    [CLS] is above that of every span, in every window.

    Args:
        samples: the windows, of which the scores are the first ones'.
        start_NT: the scores of a span's first piece.
        end_NT: the scores of its last piece.
    """
    none_may_be_right = not all(asked.question.answers for asked in samples.asked)
    best: dict[int, tuple[float, str]] = {}
    no_answer: dict[int, float] = {}
    rows = samples.windows.tolist()
    for (number, begin), start_T, end_T in zip(rows, start_NT, end_NT, strict=False):
        asked = samples.asked[number]
        none = float(start_T[0] + end_T[0])
        no_answer[number] = min(no_answer.get(number, inf), none)
        best.setdefault(number, (-inf, ""))
        num_pieces = min(samples.room(asked), len(asked.context) - begin)
        here = slice(len(asked.pieces) + 2, len(asked.pieces) + 2 + num_pieces)
        score, first, last = _best_span(start_T[here], end_T[here])
        if score > best[number][0]:
            best[number] = score, asked.said(begin + first, begin + last)
    return {
        number: "" if none_may_be_right and no_answer[number] > score else text
        for number, (score, text) in best.items()
    }


def _best_span(start_P: Tensor, end_P: Tensor) -> tuple[float, int, int]:
    """Return the score of the best span of P pieces, its first and its last piece."""
    if not len(start_P):  # a paragraph without words
        return -inf, 0, 0
    score_PP = start_P[:, None] + end_P
    is_span_PP = (
        torch.ones_like(score_PP, dtype=torch.bool).triu().tril(_MOST_PIECES - 1)
    )
    place = int(score_PP.masked_fill(~is_span_PP, -inf).argmax())
    first, last = divmod(place, len(end_P))
    return float(score_PP[first, last]), first, last


def exact_match(found: str, right: Sequence[str]) -> float:
    """Return 1 if an answer is one of the right ones, else 0."""
    return float(any(_normalized(found) == each for each in _right(right)))


def f1(found: str, right: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall over words, the best of all."""
    return max(_f1(_normalized(found).split(), each.split()) for each in _right(right))


def _normalized(text: str) -> str:
    """Return an answer in lower case, without punctuation and articles."""
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def _right(right: Sequence[str]) -> list[str]:
    """Return the right answers, normalized; none is right where there are none."""
    return [each for each in map(_normalized, right) if each] or [""]


def _f1(found: list[str], right: list[str]) -> float:
    if not found or not right:
        return float(found == right)
    num_same = sum((Counter(found) & Counter(right)).values())
    return 2 * num_same / (len(found) + len(right))
