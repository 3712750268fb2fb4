"""BERT's word pieces, by the library `tokenizers`, and vocabularies built from texts.

    "playfully" ──▶ "play" "##ful" "##ly"        ## marks a piece inside of a word

    [CLS] first sentence [SEP] second sentence [SEP] [PAD] [PAD]
      0     0  ...         0      1   ...        1     0     0      token_type_ids
      1     1  ...         1      1   ...        1     0     0      attention_mask

Two things are our own: the trainer of `tokenizers` builds another vocabulary in each
process, and so on each worker; and it cuts pairs of equal length elsewhere than
`_truncate_seq_pair` of github.com/google-research/bert does.

Source: Devlin et al., arXiv:1810.04805, section 3.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import torch
from tokenizers import BertWordPieceTokenizer, Encoding
from torch import Tensor

from hocket.errors import DataError

Ids = Sequence[int]
_ADVICE: Final = (
    "a vocab.txt has one piece in each line, as that of "
    "https://huggingface.co/google-bert/bert-base-uncased"
)
_SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class WordPieces:
    """Splits texts into pieces of a vocabulary, without case and accents.

    Args:
        entries: an uncased vocabulary in the order of ids, with the special entries.

    Attributes:
        fingerprint: the CRC-32 of the entries.

    Raises:
        DataError: a special entry is missing, or an entry is there twice.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self.entries = tuple(entries)
        ids = {entry: number for number, entry in enumerate(self.entries)}
        missing = [entry for entry in _SPECIAL[:4] if entry not in ids]
        if missing or len(ids) < len(self.entries) or "" in ids:
            raise DataError(
                f"a vocabulary of {len(self.entries)} entries, {len(ids)} of them "
                f"different, without {', '.join(missing) or 'gaps'}: {_ADVICE}"
            )
        self.pad, _, self.first, self.between = (ids[x] for x in _SPECIAL[:4])
        self.mask = ids.get(_SPECIAL[4], 0)
        self.fingerprint = zlib.crc32("\n".join(self.entries).encode())
        self._tokenizer = BertWordPieceTokenizer(ids)

    @property
    def num_entries(self) -> int:
        """The number of rows that an embedding of the vocabulary has."""
        return len(self.entries)

    def pieces(self, text: str) -> Encoding:
        """Split a text into pieces, with ids and places, without special pieces."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def batch(
        self, pairs: Sequence[tuple[Ids, Ids | None]], num_tokens: int
    ) -> dict[str, Tensor]:
        """Put special pieces around sentences or pairs: BERT's inputs, each (B, T).

        What is too long loses its last pieces, a pair those of the longer sentence.
        """
        ids_BT = torch.full((len(pairs), num_tokens), self.pad)
        used_BT, types_BT = torch.zeros_like(ids_BT), torch.zeros_like(ids_BT)
        for row, (a, b) in enumerate(pairs):
            num_free = num_tokens - (2 if b is None else 3)
            keep_b = min(len(b or ()), max(num_free // 2, num_free - len(a)))
            ids = [self.first, *a[: num_free - keep_b], self.between]
            begin_b = len(ids)
            if b is not None:
                ids += [*b[:keep_b], self.between]
            ids_BT[row, : len(ids)] = torch.tensor(ids)
            used_BT[row, : len(ids)] = 1
            types_BT[row, begin_b : len(ids)] = 1
        return {
            "input_ids": ids_BT,
            "attention_mask": used_BT,
            "token_type_ids": types_BT,
        }


def word_pieces(
    vocabulary: str | None, texts: Iterable[str], num_pieces: int
) -> WordPieces:
    """Read an uncased BERT's vocabulary; or build one, if there is no file.

    Args:
        vocabulary: the path of a `vocab.txt`.
        texts: all training texts, to build a vocabulary from.
        num_pieces: the largest size of a vocabulary that is built.

    Raises:
        DataError: the file is missing or malformed, or no vocabulary can be built.
    """
    if vocabulary is None:
        return build_vocabulary(texts, num_pieces)
    text = read_text(Path(vocabulary), _ADVICE)
    return WordPieces(text.removesuffix("\n").split("\n"))


def read_text(path: Path, advice: str) -> str:
    """Return a text file's content, without byte-order mark and carriage returns.

    Args:
        path: the file.
        advice: where to get such a file, for errors.

    Raises:
        DataError: it cannot be read, is empty, or no UTF-8.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8: {error}: {advice}") from error
    if not text:
        raise DataError(f"{path} is empty: {advice}")
    return text


def build_vocabulary(texts: Iterable[str], num_pieces: int) -> WordPieces:
    """Build a vocabulary of the texts' characters and their most frequent words.

    It covers these texts completely, and is the same in every process. (Vocabularies
    trained on much more text have frequent parts of words, too: prefer one of those.)

    Args:
        texts: all training texts.
        num_pieces: the largest number of entries.

    Raises:
        DataError: there is no word, or the characters alone are too many.
    """
    tokenizer = BertWordPieceTokenizer()
    words: Counter[str] = Counter()
    for text in texts:
        plain = tokenizer.normalizer.normalize_str(text)
        words.update(x for x, _ in tokenizer.pre_tokenizer.pre_tokenize_str(plain))
    if not words:
        raise DataError("the texts hold no word to build a vocabulary from")
    begins = sorted({word[0] for word in words})
    goes_on = sorted({f"##{character}" for word in words for character in word[1:]})
    entries = [*_SPECIAL, *begins, *goes_on]
    if num_pieces < len(entries):
        raise DataError(
            f"a vocabulary of {num_pieces} entries has no place for the characters of "
            f"the texts: data.num_pieces must be {len(entries)} or more"
        )
    known = set(entries)
    frequent = sorted(words.items(), key=lambda item: (-item[1], item[0]))
    entries += [word for word, _ in frequent if word not in known]
    return WordPieces(entries[:num_pieces])
