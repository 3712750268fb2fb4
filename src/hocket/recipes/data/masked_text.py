"""Masked language modelling: a text in windows of pieces, some of which are hidden.

    text      to   be   or   not  to   be
    inputs    [CLS] to [MASK] or not  to  fish [SEP]
    targets    -100 -100 be -100 -100 -100 be  -100

Of the pieces to be guessed, 80 % become [MASK], 10 % another piece, and 10 % stay. Each
sample has as many of them, so that a mean over samples is one over guesses. Training
chooses others in each epoch; evaluation always the same ones.

Source: Devlin et al., arXiv:1810.04805, section 3.1 and appendix A.1.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from hocket.errors import DataError
from hocket.recipes.data.bert_tokenizer import MASK, BertTokenizer, make_tokenizer
from hocket.recipes.data.origin import DataOrigin
from hocket.run.data.samples import EpochRandom

NOT_GUESSED: Final = -100

_MASKED: Final = 0.8
_CHANGED: Final = 0.9  # masked, or another piece
_ALWAYS: Final = EpochRandom(0, 0)  # what evaluation draws
_ORIGIN: Final = DataOrigin("text", "wherever your text is", "a file of lines in UTF-8")


@dataclass(frozen=True, slots=True)
class MaskedText:
    """Windows of one part of a text.

    Args:
        windows: (N, T) ids, each with the first and the last special piece.
        tokenizer: the vocabulary.
        num_guessed: pieces of each window that are to be guessed.
        fingerprint: the CRC-32 of all ids.
    """

    windows: Tensor
    tokenizer: BertTokenizer
    num_guessed: int
    fingerprint: int

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.windows)

    @property
    def guessed_share(self) -> float:
        """The share of all pieces that is to be guessed."""
        return self.num_guessed / self.windows.shape[1]

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> Tensor:
        """(B, T), int64: ids, some of them masked or changed."""
        ids_BT = self.windows[rows]
        chosen_BT, what_BT, other_BT = self._drawn(rows, draw)
        mask = self.tokenizer.entries.index(MASK)
        ids_BT = ids_BT.masked_fill(chosen_BT & (what_BT < _MASKED), mask)
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
        num_tokens = self.windows.shape[1]
        uniform = (draw or _ALWAYS).uniform(rows, 3 * num_tokens)
        order_BT, what_BT, other_BT = uniform.view(len(rows), 3, num_tokens).unbind(1)
        order_BT[:, [0, -1]] = 2.0  # special pieces are not guessed
        chosen_BT = torch.zeros_like(order_BT, dtype=torch.bool)
        first = order_BT.argsort(dim=1)[:, : self.num_guessed]
        chosen_BT.scatter_(1, first, True)
        other_BT = (other_BT * self.tokenizer.num_entries).long()
        return chosen_BT, what_BT, other_BT


def load_masked_text(
    path: Path,
    *,
    num_tokens: int,
    validation_fraction: float,
    mask_share: float,
    vocabulary: Path | None = None,
    num_entries: int = 30_522,
) -> tuple[MaskedText, MaskedText]:
    """Load a text's windows for training and for validation.

    The whole text is read and split into pieces.

    Args:
        path: the file.
        num_tokens: T.
        validation_fraction: the last part of the lines, for validation.
        mask_share: the share of pieces that is to be guessed; of at least one.
        vocabulary: a `vocab.txt` of an uncased BERT; built from the lines for training
            when not given.
        num_entries: the largest size of a vocabulary that is built.

    Raises:
        DataError: the file is missing, no text, or too short.
    """
    lines = [line for line in _ORIGIN.lines(path) if line.strip()]
    cut = len(lines) - round(validation_fraction * len(lines))
    tokenizer = make_tokenizer(vocabulary, lines[:cut], num_entries)
    training, validation = (
        _windows(part, tokenizer, num_tokens, mask_share, path)
        for part in (lines[:cut], lines[cut:])
    )
    return training, validation


def _windows(
    lines: list[str],
    tokenizer: BertTokenizer,
    num_tokens: int,
    mask_share: float,
    path: Path,
) -> MaskedText:
    ids = torch.tensor([*chain.from_iterable(tokenizer.pieces(x).ids for x in lines)])
    num_own = num_tokens - 2  # between the special pieces
    num_windows = len(ids) // num_own
    if not num_windows:
        raise DataError(
            f"{path} is too short: a part of {len(lines)} lines has {len(ids)} pieces, "
            f"and one sample is {num_own} and two special ones (data.num_tokens)"
        )
    own = ids[: num_windows * num_own].view(num_windows, num_own).long()
    ends = torch.ones(num_windows, 1, dtype=torch.int64)
    windows = torch.cat([tokenizer.first * ends, own, tokenizer.between * ends], 1)
    num_guessed = min(num_own, max(1, round(mask_share * num_tokens)))
    digest = zlib.crc32(windows.numpy().tobytes(), tokenizer.fingerprint)
    return MaskedText(windows, tokenizer, num_guessed, digest)
