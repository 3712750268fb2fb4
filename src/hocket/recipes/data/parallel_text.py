"""Parallel text: two files whose lines translate each other, as Multi30k's and WMT's.

    train.en                train.de                  one sentence a line, words with
    a man is sleeping .     ein mann schläft .        spaces between them

    source          a man is sleeping . </s> <pad>
    decoder input   <s> ein mann schläft . <pad>      what the decoder is given
    target              ein mann schläft . </s>       what it should say

Source: D. Elliott et al., "Multi30K: Multilingual English-German image descriptions",
arXiv:1605.00459, https://github.com/multi30k/dataset; https://statmt.org/wmt14.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from hocket.errors import DataError
from hocket.recipes.data.origin import Origin
from hocket.recipes.data.vocabulary import BEGIN, END, PAD, Vocabulary
from hocket.run.data.samples import EpochRandom

_FEWEST_TOKENS: Final = 2  # a word, and the mark at its beginning or end


@dataclass(frozen=True, slots=True)
class Side:
    """One language.

    Args:
        lines: one sentence each.
        vocabulary: of the training lines.
        num_tokens: of every sample: longer ones are cut, shorter ones padded.
    """

    lines: Sequence[str]
    vocabulary: Vocabulary
    num_tokens: int

    def rows(self, rows: Tensor) -> list[list[int]]:
        """The words of these lines, with room left for a mark."""
        longest = self.num_tokens - 1
        return [
            self.vocabulary.encode(self.lines[row])[:longest] for row in rows.tolist()
        ]

    def padded(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """(B, num_tokens), int64."""
        filled = torch.full((len(ids), self.num_tokens), PAD)
        for row, words in enumerate(ids):
            filled[row, : len(words)] = torch.tensor(words)
        return filled


@dataclass(frozen=True, slots=True)
class ParallelText:
    """Pairs of sentences.

    Args:
        source: what is translated.
        target: what it is translated into.
        fingerprint: of lines and vocabularies.
        num_left_out: pairs of which a side is empty.
    """

    source: Side
    target: Side
    fingerprint: int
    num_left_out: int

    @property
    def num_samples(self) -> int:
        """Pairs."""
        return len(self.source.lines)

    @property
    def source_vocabulary(self) -> Vocabulary:
        """Of the language that is translated."""
        return self.source.vocabulary

    @property
    def target_vocabulary(self) -> Vocabulary:
        """Of the language that it is translated into."""
        return self.target.vocabulary

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> tuple[Tensor, Tensor]:
        """Source (B, S) and decoder input (B, T), int64."""
        del draw
        sources = [[*words, END] for words in self.source.rows(rows)]
        given = [[BEGIN, *words] for words in self.target.rows(rows)]
        return self.source.padded(sources), self.target.padded(given)

    def targets(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """(B, T), int64: the decoder input one word later; PAD where nothing is due."""
        del draw
        return self.target.padded([[*words, END] for words in self.target.rows(rows)])


def load_parallel_text(
    folder: Path,
    *,
    source: str = "en",
    target: str = "de",
    training: str = "train",
    validation: str = "val",
    num_source_tokens: int,
    num_target_tokens: int,
    max_entries: int = 30_000,
    min_count: int = 2,
) -> tuple[ParallelText, ParallelText]:
    """The pairs for training and for validation.

    Pairs of which a side is empty are left out, as WMT's files have some.

    Args:
        folder: with `train.en`, `train.de`, `val.en` and `val.de`, or as named below.
        source: the ending of the files that are translated.
        target: the ending of those that they are translated into.
        training: the name of the training files, before the dot.
        validation: likewise.
        num_source_tokens: of every source: longer ones are cut, shorter ones padded.
        num_target_tokens: likewise, of every target.
        max_entries: of each vocabulary; both are made of the training files.
        min_count: how often a word must occur in them to be known.

    Raises:
        DataError: a file is missing or malformed, or two that belong together have not
            equally many lines; names both numbers.
    """
    if min(num_source_tokens, num_target_tokens) < _FEWEST_TOKENS:
        raise DataError(
            f"sentences of {num_source_tokens} and {num_target_tokens} tokens hold no "
            f"word beside their mark: give at least {_FEWEST_TOKENS}"
        )
    sources, targets, num_left_out = _read(folder, training, source, target)
    vocabularies = tuple(
        Vocabulary.of(lines, max_entries=max_entries, min_count=min_count)
        for lines in (sources, targets)
    )
    parts = []
    for part in (
        (sources, targets, num_left_out),
        _read(folder, validation, source, target),
    ):
        digest = zlib.crc32(repr(part).encode())
        parts.append(
            ParallelText(
                Side(part[0], vocabularies[0], num_source_tokens),
                Side(part[1], vocabularies[1], num_target_tokens),
                digest ^ vocabularies[0].fingerprint ^ vocabularies[1].fingerprint,
                part[2],
            )
        )
    return parts[0], parts[1]


def _read(
    folder: Path, name: str, source: str, target: str
) -> tuple[list[str], list[str], int]:
    """The lines of two files that belong together, without the pairs left out."""
    origin = Origin(
        "parallel text",
        "https://github.com/multi30k/dataset or https://statmt.org/wmt14",
        f"a folder with {name}.{source} and {name}.{target}, whose lines translate "
        "each other",
    )
    paths = [origin.find(folder, f"{name}.{ending}") for ending in (source, target)]
    one, other = (origin.lines(path) for path in paths)
    if len(one) != len(other):
        raise DataError(
            f"{paths[0]} has {len(one)} lines and {paths[1]} has {len(other)}: each "
            "line must translate the other file's line of the same number. Do both "
            "belong to the same version, and is neither cut off?"
        )
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a.strip() and b.strip()]
    if not pairs:
        raise DataError(
            f"{paths[0]} and {paths[1]} have no line with words in both: "
            f"{origin.advice}"
        )
    return [a for a, _ in pairs], [b for _, b in pairs], len(one) - len(pairs)
