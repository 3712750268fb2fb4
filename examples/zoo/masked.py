"""Masked language modelling: a text in windows of pieces, some of which are hidden.

    text      to   be   or   not  to   be
    inputs    [CLS] to [MASK] or not  to  fish [SEP]
    targets    -100 -100 be -100 -100 -100 be  -100

Of the pieces to be guessed, 80 % become [MASK], 10 % another piece, and 10 % stay. Each
sample has as many of them. Training chooses others in each epoch; evaluation always the
same ones. (DataCollatorForLanguageModeling of transformers draws in the process that
collates: workers that read inputs and targets would not agree.)

Source: Devlin et al., arXiv:1810.04805, section 3.1 and appendix A.1.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from examples.zoo.word_pieces import WordPieces, read_text, word_pieces
from hocket.errors import DataError
from hocket.run.data.loss import TokenMean
from hocket.run.data.samples import EpochRandom

NOT_GUESSED: Final = -100
_MASKED: Final = 0.8
_CHANGED: Final = 0.9  # masked, or another piece
_ALWAYS: Final = EpochRandom(0, 0)  # what evaluation draws


@dataclass(frozen=True, slots=True)
class MaskedText:
    """Windows of one part of a text.

    Args:
        windows: (N, T) ids, each with the first and the last special piece.
        words: the vocabulary.
        num_guessed: pieces of each window that are to be guessed.
        fingerprint: the CRC-32 of all ids.
        head: what a BERT has at its end.
    """

    windows: Tensor
    words: WordPieces
    num_guessed: int
    fingerprint: int
    head: str = "masked"

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.windows)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.windows.shape[1]

    @property
    def num_pieces(self) -> int:
        """The size of the vocabulary."""
        return self.words.num_entries

    @property
    def guessed_share(self) -> float:
        """The share of all pieces that is to be guessed."""
        return self.num_guessed / self.num_tokens

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """(B, T), int64: ids, some of them masked or changed."""
        ids_BT = self.windows[rows]
        chosen_BT, what_BT, other_BT = self._drawn(rows, draw)
        ids_BT = ids_BT.masked_fill(chosen_BT & (what_BT < _MASKED), self.words.mask)
        is_changed_BT = chosen_BT & (what_BT >= _MASKED) & (what_BT < _CHANGED)
        return torch.where(is_changed_BT, other_BT, ids_BT)

    def targets(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """(B, T), int64: the ids to be guessed; -100 elsewhere."""
        chosen_BT, _, _ = self._drawn(rows, draw)
        return self.windows[rows].masked_fill(~chosen_BT, NOT_GUESSED)

    def _drawn(
        self, rows: Tensor, draw: EpochRandom | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return which pieces are chosen, a number for what is done, another piece."""
        uniform = (draw or _ALWAYS).uniform(rows, 3 * self.num_tokens)
        parts = uniform.view(len(rows), 3, self.num_tokens)
        order_BT, what_BT, other_BT = parts.unbind(1)
        order_BT[:, [0, -1]] = 2.0  # special pieces are not guessed
        chosen_BT = torch.zeros_like(order_BT, dtype=torch.bool)
        chosen_BT.scatter_(1, order_BT.argsort(dim=1)[:, : self.num_guessed], True)
        return chosen_BT, what_BT, (other_BT * self.num_pieces).long()


def masked_text(
    path: str,
    num_tokens: int = 128,
    validation_fraction: float = 0.1,
    mask_share: float = 0.15,
    vocabulary: str | None = None,
    num_pieces: int = 30_522,
) -> tuple[MaskedText, MaskedText]:
    """Load a text's windows for training and for validation.

    Args:
        path: a file of lines in UTF-8.
        num_tokens: T.
        validation_fraction: the last part of the lines, for validation.
        mask_share: the share of pieces that is to be guessed; of at least one.
        vocabulary: a `vocab.txt` of an uncased BERT; built from the lines for training
            where it is not said.
        num_pieces: the largest size of a vocabulary that is built.

    Raises:
        DataError: the file is missing, no text, or too short.
    """
    lines = [
        line
        for line in read_text(Path(path), "name a text with data.path").split("\n")
        if line.strip()
    ]
    cut = len(lines) - round(validation_fraction * len(lines))
    words = word_pieces(vocabulary, lines[:cut], num_pieces)
    num_guessed = min(num_tokens - 2, max(1, round(mask_share * num_tokens)))
    training, validation = (
        _windows(part, words, num_tokens, num_guessed, path)
        for part in (lines[:cut], lines[cut:])
    )
    return training, validation


def _windows(
    lines: Sequence[str],
    words: WordPieces,
    num_tokens: int,
    num_guessed: int,
    path: str,
) -> MaskedText:
    ids = torch.tensor([*chain.from_iterable(words.pieces(x).ids for x in lines)])
    num_own = num_tokens - 2  # between the special pieces
    num_windows = len(ids) // num_own
    if not num_windows:
        raise DataError(
            f"{path} is too short: a part of {len(lines)} lines has {len(ids)} pieces, "
            f"and one sample is {num_own} and two special ones (data.num_tokens)"
        )
    own = ids[: num_windows * num_own].view(num_windows, num_own).long()
    ends = torch.ones(num_windows, 1, dtype=torch.int64)
    windows = torch.cat([words.first * ends, own, words.between * ends], 1)
    digest = zlib.crc32(windows.numpy().tobytes(), words.fingerprint)
    return MaskedText(windows, words, num_guessed, digest)


def guesses(output: Any, target_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy over the masked pieces, in nats."""
    scores = output["logits"].flatten(0, 1)
    return functional.cross_entropy(scores, target_BT.flatten())


def num_masked(target_BT: Tensor) -> Tensor:
    """Return how many pieces are masked, which `guesses` divides by."""
    return (target_BT != NOT_GUESSED).sum()


loss: Final = TokenMean(guesses, count=num_masked)


def accuracy(output: Any, target_BT: Tensor) -> dict[str, Tensor]:
    """Return the share of masked pieces that are guessed correctly."""
    is_right_BT = output["logits"].argmax(-1) == target_BT
    return {"masked_accuracy": is_right_BT.sum() / num_masked(target_BT)}
