"""Masked language modelling: which pieces are hidden, and what a sample is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.zoo.masked import NOT_GUESSED, MaskedText, masked_text
from hocket.errors import DataError
from hocket.run.data.samples import EpochRandom

NUM_TOKENS = 20
WORDS = "to be or not to be that is the question whether tis nobler in the mind"


def loaded(folder: Path, num_lines: int = 2000) -> MaskedText:
    """A text of these words, to train on."""
    path = folder / "text.txt"
    path.write_text(f"{WORDS}\n\n" * num_lines)
    return masked_text(str(path), NUM_TOKENS)[0]


def test_inputs_are_the_text_but_for_what_is_guessed(tmp_path: Path) -> None:
    """Each sample has three guesses, and never one of the special pieces."""
    text = loaded(tmp_path)
    rows = torch.arange(text.num_samples)
    for draw in (None, EpochRandom(3, 1)):
        inputs, targets = text.inputs(rows, draw), text.targets(rows, draw)
        is_guessed = targets != NOT_GUESSED
        assert is_guessed.sum(1).eq(3).all()
        assert text.guessed_share == 3 / NUM_TOKENS
        assert not is_guessed[:, [0, -1]].any()
        assert inputs[~is_guessed].equal(text.windows[~is_guessed])
        assert targets[is_guessed].equal(text.windows[is_guessed])


def test_most_guesses_are_masked(tmp_path: Path) -> None:
    """80 % of them; 10 % are another piece, the same piece by chance among them."""
    text = loaded(tmp_path)
    rows = torch.arange(text.num_samples)
    draw = EpochRandom(0, 0)
    inputs, targets = text.inputs(rows, draw), text.targets(rows, draw)
    guessed = inputs[targets != NOT_GUESSED]
    mask = text.words.entries.index("[MASK]")
    same = guessed == targets[targets != NOT_GUESSED]

    assert len(guessed) > 4000
    assert float((guessed == mask).float().mean()) == pytest.approx(0.8, abs=0.03)
    assert 0.09 < float(same.float().mean()) < 0.14


def test_each_epoch_guesses_others(tmp_path: Path) -> None:
    """Evaluation always the same; a row does not depend on its batch."""
    text = loaded(tmp_path)
    rows = torch.tensor([4, 1, 7])
    first, second = (text.targets(rows, EpochRandom(0, epoch)) for epoch in (0, 1))
    assert not first.equal(second)
    assert text.targets(rows, None).equal(text.targets(rows, None))
    assert text.targets(rows[1:2], EpochRandom(0, 0)).equal(first[1:2])


def test_a_text_that_is_too_short(tmp_path: Path) -> None:
    """The part, its pieces, and how many a sample has."""
    with pytest.raises(DataError, match=r"a part of 1 lines has 16 pieces.*is 18 and"):
        loaded(tmp_path, 10)
    with pytest.raises(DataError, match="cannot be read"):
        masked_text(str(tmp_path / "no.txt"), 8)
