"""BERT's WordPiece tokenizer, from the library `tokenizers`, with BERT's own joining.

    "playfully" ──▶ "play" "##ful" "##ly"        ## marks a piece inside of a word

    [CLS] first sentence [SEP] second sentence [SEP] [PAD] [PAD]
      0     0  ...         0      1   ...        1     0     0      token_type_ids
      1     1  ...         1      1   ...        1     0     0      attention_mask

Pairs are joined here, because `tokenizers` truncates pairs of equal length elsewhere
than `_truncate_seq_pair` of github.com/google-research/bert does.

Source: Devlin et al., arXiv:1810.04805, section 3; Wu et al., arXiv:1609.08144,
section 4.1.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from hocket.errors import DataError, MissingPackageError
from hocket.recipes.data.origin import DataOrigin

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

PAD: Final = "[PAD]"
UNKNOWN: Final = "[UNK]"
FIRST: Final = "[CLS]"
BETWEEN: Final = "[SEP]"
MASK: Final = "[MASK]"
_SPECIAL: Final = (PAD, UNKNOWN, FIRST, BETWEEN, MASK)

VOCABULARY: Final = DataOrigin(
    "a WordPiece vocabulary",
    "https://huggingface.co/google-bert/bert-base-uncased (vocab.txt)",
    "a text file with one entry per line",
)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The ids of one sentence or pair, padded to the length of its batch.

    Args:
        ids: the ids of the pieces.
        types: 0 for the first sentence, 1 for the second.
        num_used: pieces before the padding.
    """

    ids: list[int]
    types: list[int]
    num_used: int


class BertTokenizer:
    """Splits texts into pieces of a WordPiece vocabulary, without case and accents.

    Args:
        entries: an uncased vocabulary in the order of ids, with the special entries.

    Attributes:
        fingerprint: the CRC-32 of the entries.

    Raises:
        DataError: a special entry is missing.
        MissingPackageError: `tokenizers` is not installed.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self.entries = tuple(entries)
        ids = {entry: i for i, entry in enumerate(self.entries)}
        self.fingerprint = zlib.crc32("\n".join(self.entries).encode())
        missing = [entry for entry in _SPECIAL[:4] if entry not in ids]
        if missing:
            raise DataError(
                f"the vocabulary of {len(self.entries)} entries has no "
                f"{', '.join(missing)}: {VOCABULARY.advice}"
            )
        self.pad, self.unknown, self.first, self.between = (
            ids[entry] for entry in _SPECIAL[:4]
        )
        self._tokenizer = _tokenizer(ids)

    @classmethod
    def read(cls, path: Path) -> BertTokenizer:
        """Read a `vocab.txt`: one entry per line, whose number from 0 is its id.

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
        return cls(entries)

    @property
    def num_entries(self) -> int:
        """The number of rows that an embedding of the vocabulary has."""
        return len(self.entries)

    def pieces(self, text: str) -> Encoding:
        """Split a text into pieces, with ids and places, without special pieces."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def encode(self, first: str, second: str | None, num_tokens: int) -> Encoded:
        """Encode a sentence, or a pair of them, as exactly `num_tokens` pieces.

        What is too long loses its last pieces, a pair those of the longer sentence.
        """
        a = self.pieces(first).ids
        b = None if second is None else self.pieces(second).ids
        return self.join(a, b, num_tokens)

    def join(
        self, a: Sequence[int], b: Sequence[int] | None, num_tokens: int
    ) -> Encoded:
        """Put the special pieces around a sentence or a pair, and pad to the length."""
        num_free = num_tokens - (2 if b is None else 3)
        keep_b = min(len(b or ()), max(num_free // 2, num_free - len(a)))
        ids = [self.first, *a[: num_free - keep_b], self.between]
        types = [0] * len(ids)
        if b is not None:
            ids += [*b[:keep_b], self.between]
            types += [1] * (keep_b + 1)
        padding = num_tokens - len(ids)
        return Encoded(ids + [self.pad] * padding, types + [0] * padding, len(ids))


def make_tokenizer(
    vocabulary: Path | None, texts: Iterable[str], num_entries: int
) -> BertTokenizer:
    """Read an uncased BERT's vocabulary; or build one, if there is no file.

    Args:
        vocabulary: a `vocab.txt`.
        texts: all training texts, to build a vocabulary from.
        num_entries: the largest size of a vocabulary that is built.

    Raises:
        DataError: the file is missing or malformed, or no vocabulary can be built.
    """
    if vocabulary is None:
        return build_vocabulary(texts, num_entries)
    return BertTokenizer.read(vocabulary)


def batch_of(encoded: Sequence[Encoded]) -> dict[str, Tensor]:
    """Stack samples of one length as BERT's inputs: each (B, T), int64."""
    num_tokens = len(encoded[0].ids)
    used_B1 = torch.tensor([[each.num_used] for each in encoded])
    return {
        "input_ids": torch.tensor([each.ids for each in encoded]),
        "attention_mask": (torch.arange(num_tokens) < used_B1).long(),
        "token_type_ids": torch.tensor([each.types for each in encoded]),
    }


def build_vocabulary(texts: Iterable[str], num_entries: int) -> BertTokenizer:
    """Build a vocabulary of the texts' characters and their most frequent words.

    It covers these texts completely. (Vocabularies trained on much more text have
    frequent parts of words, too: prefer one of those.)

    Args:
        texts: all training texts.
        num_entries: the largest number of entries.

    Raises:
        DataError: there is no word, or the characters alone are too many.
        MissingPackageError: `tokenizers` is not installed.
    """
    tokenizer = _tokenizer({UNKNOWN: 0})
    words: Counter[str] = Counter()
    for text in texts:
        plain = tokenizer.normalizer.normalize_str(text)
        words.update(
            word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(plain)
        )
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
    return BertTokenizer(entries[:num_entries])


def _tokenizer(ids: dict[str, int]) -> Tokenizer:
    try:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    except ImportError as error:
        raise MissingPackageError(
            "WordPiece comes with tokenizers, which is not installed: "
            "pip install 'hocket[recipes]'"
        ) from error
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer
