"""Words by frequency, with marks for padding, the unknown, beginning and end."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from hocket.errors import DataError

PAD: Final = 0
UNKNOWN: Final = 1
BEGIN: Final = 2
END: Final = 3
_MARKS: Final = ("<pad>", "<unk>", "<s>", "</s>")


class Vocabulary:
    """Words and their ids; the four marks come first.

    Args:
        words: by id, from 4 on.

    Attributes:
        entries: the marks and the words, by id.
        fingerprint: 32 bits of them.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.entries = (*_MARKS, *words)
        self.fingerprint = zlib.crc32("\n".join(self.entries).encode())
        self._ids = {word: i for i, word in enumerate(words, start=len(_MARKS))}

    @classmethod
    def of(
        cls, lines: Iterable[str], *, max_entries: int, min_count: int
    ) -> Vocabulary:
        """The most frequent words of some lines; of equal ones the first by spelling.

        Args:
            lines: words with spaces between them.
            max_entries: of them, the marks among them.
            min_count: how often a word must occur.

        Raises:
            DataError: no word is left.
        """
        counts: Counter[str] = Counter()
        for line in lines:
            counts.update(line.split())
        frequent = sorted(
            (item for item in counts.items() if item[1] >= min_count),
            key=lambda item: (-item[1], item[0]),
        )
        words = [word for word, _ in frequent[: max(0, max_entries - len(_MARKS))]]
        if not words:
            raise DataError(
                f"no word is left for a vocabulary of at most {max_entries} entries: "
                f"of {len(counts)} different words {len(frequent)} occur at least "
                f"{min_count} times"
            )
        return cls(words)

    @property
    def num_entries(self) -> int:
        """How many rows an embedding of it has."""
        return len(self.entries)

    def encode(self, line: str) -> list[int]:
        """The ids of a line's words."""
        return [self._ids.get(word, UNKNOWN) for word in line.split()]

    def decode(self, ids: Iterable[int]) -> str:
        """The words up to the end mark, without the other marks but the unknown."""
        words = []
        for i in ids:
            if i == END:
                break
            if i not in (PAD, BEGIN):
                words.append(self.entries[i])
        return " ".join(words)
