"""Split text into the words and signs that WordPiece takes apart further.

    "The café's"  ──▶  "the" "cafe" "'" "s"      lower case, accents off, signs alone

Source: `BasicTokenizer` of github.com/google-research/bert, tokenization.py (Devlin et
al., arXiv:1810.04805); its oracle in the tests is transformers' tokenizer.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Final

# Blocks of Chinese characters, each of which is a word of its own.
_CHINESE: Final = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)
_ASCII_WORDS: Final = re.compile(r"[A-Za-z0-9]+|[!-/:-@\[-`{-~]")


class _Kind(Enum):
    """What a character does."""

    WORD = "is part of a word"
    SIGN = "stands alone"
    SPACE = "ends a word"
    NOTHING = "is left out"


@dataclass(frozen=True, slots=True)
class Word:
    """A word, and where it stands in the text.

    Args:
        text: as the vocabulary may know it.
        begin: its first character's index in the text.
        end: behind its last character.
    """

    text: str
    begin: int
    end: int


def words_of(text: str, *, lower_case: bool) -> list[str]:
    """The words and signs of a text, in order."""
    if text.isascii() and text.isprintable():
        return _ASCII_WORDS.findall(text.lower() if lower_case else text)
    return [word.text for word in located_words(text, lower_case=lower_case)]


def located_words(text: str, *, lower_case: bool) -> Iterator[Word]:
    """The same, with their places in the text."""
    if text.isascii() and text.isprintable():
        for match in _ASCII_WORDS.finditer(text.lower() if lower_case else text):
            yield Word(match.group(), match.start(), match.end())
        return
    for begin, end in _places(text):
        yield from _word(text, begin, end, lower_case=lower_case)


def _places(text: str) -> Iterator[tuple[int, int]]:
    """Where words and signs begin and end."""
    begin: int | None = None
    for at, character in enumerate(text):
        kind = _kind(character)
        if kind is _Kind.WORD and begin is None:
            begin = at
        if kind in (_Kind.WORD, _Kind.NOTHING):
            continue
        if begin is not None:
            yield begin, at
            begin = None
        if kind is _Kind.SIGN:
            yield at, at + 1
    if begin is not None:
        yield begin, len(text)


def _word(text: str, begin: int, end: int, *, lower_case: bool) -> Iterator[Word]:
    """A word as the vocabulary may know it; nothing if nothing is left of it."""
    word = "".join(c for c in text[begin:end] if _kind(c) is not _Kind.NOTHING)
    if lower_case:
        plain = unicodedata.normalize("NFD", word.lower())
        word = "".join(c for c in plain if unicodedata.category(c) != "Mn")
    if word:
        yield Word(word, begin, end)


@lru_cache(maxsize=65_536)
def _kind(character: str) -> _Kind:
    category = unicodedata.category(character)
    if character in "\t\n\r" or category.startswith("Z"):
        return _Kind.SPACE
    if character == "\ufffd" or category.startswith("C"):
        return _Kind.NOTHING
    if _is_sign(character, category) or _is_chinese(ord(character)):
        return _Kind.SIGN
    return _Kind.WORD


def _is_sign(character: str, category: str) -> bool:
    """Punctuation; of ASCII everything that is no letter or digit, such as $ and ^."""
    return category.startswith("P") or (character.isascii() and not character.isalnum())


def _is_chinese(code: int) -> bool:
    return any(first <= code <= last for first, last in _CHINESE)
