"""Sentences in two languages for the recipe beside this file, as Multi30k has them.

    train.en                train.de                  one sentence a line, words with
    a man is sleeping .     ein mann schläft .        spaces between them

    source          a man is sleeping . </s> <pad>
    decoder input   <s> ein mann schläft . <pad>      what the decoder is given
    target              ein mann schläft . </s>       what it should say

Data: D. Elliott et al., arXiv:1605.00459, https://github.com/multi30k/dataset (task 1).
"""

from __future__ import annotations

import zlib
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

PAD, UNKNOWN, BEGIN, END = range(4)  # the first four ids; words come after them


class ParallelText:
    """Pairs of sentences as `hocket.run.data.samples.Samples`: N pairs, T words each.

    Args:
        source_NT: ids of what is translated.
        target_NT: ids of the translation, one longer, from BEGIN to END.
    """

    def __init__(self, source_NT: Tensor, target_NT: Tensor) -> None:
        given_NT = target_NT[:, :-1]
        self._inputs = source_NT, given_NT.masked_fill(given_NT == END, PAD)
        self._targets = target_NT[:, 1:]
        self.num_samples = len(source_NT)
        both = torch.cat([source_NT, target_NT], 1).contiguous().numpy()
        self.fingerprint = zlib.crc32(both.tobytes())

    def inputs(self, rows: Tensor, draw: object) -> tuple[Tensor, Tensor]:
        """What the model takes, of some rows."""
        source_NT, given_NT = self._inputs
        return source_NT[rows], given_NT[rows]

    def targets(self, rows: Tensor, draw: object) -> Tensor:
        """What the loss takes, of the same rows."""
        return self._targets[rows]


def make_data(
    folder: str,
    max_words: int,
    num_tokens: int = 32,
    training: str = "train",
    validation: str = "val",
) -> tuple[ParallelText, ParallelText]:
    """Read train.en, train.de, val.en and val.de; words of training are known."""
    parts: list[list[Tensor]] = [[], []]
    for language, marks in (("en", []), ("de", [BEGIN])):
        counts: Counter[str] = Counter()
        for part, name in zip(parts, (training, validation), strict=True):
            with (Path(folder) / f"{name}.{language}").open(encoding="utf-8") as file:
                lines = [line.split() for line in file]
            if not counts:
                counts.update(word for line in lines for word in line)
                often = [word for word in counts if counts[word] > 1]
                often.sort(key=lambda word: (-counts[word], word))
                ids = {word: i for i, word in enumerate(often[: max_words - 4], 4)}
            num_ids = num_tokens + len(marks)
            ids_NT = torch.full((len(lines), num_ids), PAD)
            for row, line in enumerate(lines):
                words = [ids.get(word, UNKNOWN) for word in line[: num_tokens - 1]]
                sentence = [*marks, *words, END]
                ids_NT[row, : len(sentence)] = torch.tensor(sentence)
            part.append(ids_NT)
    return ParallelText(*parts[0]), ParallelText(*parts[1])
