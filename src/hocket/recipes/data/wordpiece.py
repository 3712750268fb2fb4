"""WordPiece: words as pieces of a fixed vocabulary, the longest first.

    "playfully" ──▶ "play" "##ful" "##ly"        ## goes on with a word

    [CLS] first sentence [SEP] second sentence [SEP] [PAD] [PAD]
      0     0  ...         0      1   ...        1     0     0      token_type_ids
      1     1  ...         1      1   ...        1     0     0      attention_mask

Source: Devlin et al., arXiv:1810.04805, section 3; Wu et al., arXiv:1609.08144,
section 4.1.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from hocket.errors import DataError
from hocket.recipes.data.bert_words import words_of
from hocket.recipes.data.origin import Origin

PAD: Final = "[PAD]"
UNKNOWN: Final = "[UNK]"
FIRST: Final = "[CLS]"
BETWEEN: Final = "[SEP]"
MASK: Final = "[MASK]"
_SPECIAL: Final = (PAD, UNKNOWN, FIRST, BETWEEN, MASK)
_LONGEST_WORD: Final = 100  # characters; a longer one is unknown

VOCABULARY: Final = Origin(
    "a WordPiece vocabulary",
    "https://huggingface.co/google-bert/bert-base-uncased (vocab.txt)",
    "a text file with one entry per line",
)


@dataclass(frozen=True, slots=True)
class Encoded:
    """One sentence or pair, as long as all others.

    Args:
        ids: of the pieces.
        types: 0 for the first sentence, 1 for the second.
        num_used: pieces before the padding.
    """

    ids: list[int]
    types: list[int]
    num_used: int


class WordPiece:
    """A vocabulary, and how text is written with it.

    Args:
        entries: by id; the special ones among them.
        lower_case: whether letters lose their case and accents first, as the
            vocabularies called "uncased" expect.

    Attributes:
        fingerprint: 32 bits of the entries.

    Raises:
        DataError: a special entry is missing, or one occurs twice.
    """

    def __init__(self, entries: Sequence[str], *, lower_case: bool = True) -> None:
        self.entries = tuple(entries)
        self.lower_case = lower_case
        self._ids = {entry: i for i, entry in enumerate(self.entries)}
        self.fingerprint = zlib.crc32("\n".join(self.entries).encode())
        self._known: dict[str, tuple[int, ...]] = {}
        missing = [entry for entry in _SPECIAL[:4] if entry not in self._ids]
        if missing:
            raise DataError(
                f"the vocabulary of {len(self.entries)} entries has no "
                f"{', '.join(missing)}: {VOCABULARY.advice}"
            )
        self.pad, self.unknown, self.first, self.between = (
            self._ids[entry] for entry in _SPECIAL[:4]
        )

    @classmethod
    def read(cls, path: Path, *, lower_case: bool = True) -> WordPiece:
        """A `vocab.txt`: one entry per line, whose number from 0 is its id.

        Raises:
            DataError: the file is missing or malformed; names the line.
        """
        entries = VOCABULARY.lines(path)
        lines: dict[str, int] = {}
        for line, entry in enumerate(entries, start=1):
            if not entry.strip():
                raise DataError(
                    f"{path}, line {line}: an empty line, where an entry is due. "
                    f"{VOCABULARY.advice}"
                )
            if entry in lines:
                raise DataError(
                    f"{path}, line {line}: {entry!r} is on line {lines[entry]} "
                    f"already. {VOCABULARY.advice}"
                )
            lines[entry] = line
        return cls(entries, lower_case=lower_case)

    @property
    def num_entries(self) -> int:
        """How many rows an embedding of it has."""
        return len(self.entries)

    def pieces(self, text: str) -> list[int]:
        """The ids of a text's pieces; words that it cannot write are unknown."""
        ids: list[int] = []
        for word in words_of(text, lower_case=self.lower_case):
            ids += self.pieces_of_word(word)
        return ids

    def pieces_of_word(self, word: str) -> tuple[int, ...]:
        """The longest entry that begins the word, then the longest that goes on."""
        known = self._known.get(word)
        if known is None:
            known = self._known[word] = self._take_apart(word)
        return known

    def encode(self, first: str, second: str | None, num_tokens: int) -> Encoded:
        """A sentence, or a pair of them, in exactly `num_tokens` pieces.

        What is too long loses its last pieces, of a pair always the longer one.
        """
        a = self.pieces(first)
        b = None if second is None else self.pieces(second)
        return self.join(a, b, num_tokens)

    def join(
        self, a: Sequence[int], b: Sequence[int] | None, num_tokens: int
    ) -> Encoded:
        """Pieces of a sentence, or of a pair, with what stands around them."""
        num_a, num_b = _fitting(
            len(a), 0 if b is None else len(b), num_tokens - (2 if b is None else 3)
        )
        ids = [self.first, *a[:num_a], self.between]
        types = [0] * len(ids)
        if b is not None:
            ids += [*b[:num_b], self.between]
            types += [1] * (num_b + 1)
        num_free = num_tokens - len(ids)
        return Encoded(ids + [self.pad] * num_free, types + [0] * num_free, len(ids))

    def _take_apart(self, word: str) -> tuple[int, ...]:
        if len(word) > _LONGEST_WORD:
            return (self.unknown,)
        ids: list[int] = []
        begin = 0
        while begin < len(word):
            for end in range(len(word), begin, -1):
                piece = word[begin:end] if begin == 0 else f"##{word[begin:end]}"
                if piece in self._ids:
                    ids.append(self._ids[piece])
                    begin = end
                    break
            else:
                return (self.unknown,)
        return tuple(ids)


def batch_of(encoded: Sequence[Encoded]) -> dict[str, Tensor]:
    """Several of the same length, as BERT's forward takes them: each (B, T), int64."""
    num_tokens = len(encoded[0].ids)
    used_B1 = torch.tensor([[each.num_used] for each in encoded])
    return {
        "input_ids": torch.tensor([each.ids for each in encoded]),
        "attention_mask": (torch.arange(num_tokens) < used_B1).long(),
        "token_type_ids": torch.tensor([each.types for each in encoded]),
    }


def build_vocabulary(
    texts: Iterable[str], num_entries: int, *, lower_case: bool = True
) -> WordPiece:
    """A vocabulary of some texts: their characters, then their most frequent words.

    Nothing in these texts is unknown to it. (Vocabularies trained on much more text
    know frequent parts of words too; give one of these where there is one.)

    Args:
        texts: all of them.
        num_entries: at most.
        lower_case: as for the WordPiece.

    Raises:
        DataError: there is no word, or the characters alone are too many.
    """
    words: Counter[str] = Counter()
    for text in texts:
        words.update(words_of(text, lower_case=lower_case))
    if not words:
        raise DataError("the texts hold no word to build a vocabulary from")
    begins = sorted({word[0] for word in words})
    goes_on = sorted({f"##{character}" for word in words for character in word[1:]})
    entries = [*_SPECIAL, *begins, *goes_on]
    if num_entries < len(entries):
        raise DataError(
            f"a vocabulary of {num_entries} entries has no place for the "
            f"{len(begins)} characters that words begin with, the {len(goes_on)} that "
            f"they go on with and {len(_SPECIAL)} special entries: give it at least "
            f"{len(entries)}"
        )
    known = set(entries)
    frequent = sorted(words.items(), key=lambda item: (-item[1], item[0]))
    entries += [word for word, _ in frequent if word not in known]
    return WordPiece(entries[:num_entries], lower_case=lower_case)


def _fitting(num_a: int, num_b: int, num_free: int) -> tuple[int, int]:
    """How many pieces of each are kept, so that both together fit."""
    num_over = num_a + num_b - num_free
    if num_over <= 0:
        return num_a, num_b
    # The longer one is cut down to the other's length, then both by turns.
    longer = max(num_a, num_b)
    from_longer = min(num_over, longer - min(num_a, num_b))
    longer -= from_longer
    num_a, num_b = min(num_a, longer), min(num_b, longer)
    num_over -= from_longer
    return num_a - num_over // 2, num_b - (num_over - num_over // 2)
