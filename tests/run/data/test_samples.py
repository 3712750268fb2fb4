"""Draws: the numbers of a row, in every process; and a small size of real data."""

from __future__ import annotations

import pickle
from copy import copy

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.run.data.samples import (
    _STEP,
    EpochRandom,
    FirstSamples,
    _mixed,
    first_samples,
)
from tests.run.support.numbered_samples import Numbered

seeds = st.integers(0, 2**32 - 1)
many_rows = st.lists(st.integers(0, 2**40), min_size=1, max_size=20)


@given(seed=seeds, epoch=st.integers(0, 1000), rows=many_rows)
def test_a_row_has_its_numbers_in_every_process(
    seed: int, epoch: int, rows: list[int]
) -> None:
    """Alone, among others, in another order: so that a batch can be read in parts."""
    draw = EpochRandom(seed, epoch)
    together = draw.uniform(torch.tensor(rows), 3)

    assert together.shape == (len(rows), 3)
    assert together.dtype == torch.float64
    assert ((together >= 0) & (together < 1)).all()
    for row, numbers in zip(rows, together, strict=True):
        assert torch.equal(draw.uniform(torch.tensor([row]), 3)[0], numbers)


def test_numbers_are_spread_evenly_and_differ() -> None:
    """Over rows, epochs and seeds: no two alike, and means and variances as they are.

    Of n uniform numbers the mean is within 5 standard errors of 1/2.
    """
    rows = torch.arange(5000)
    draws = [EpochRandom(seed, epoch) for seed in range(3) for epoch in range(3)]
    numbers = torch.stack([draw.uniform(rows, 4) for draw in draws])

    assert len(numbers.unique()) == numbers.numel()
    error = (1 / 12) ** 0.5
    assert ((numbers.mean(1) - 0.5).abs() < 5 * error / 5000**0.5).all()
    assert ((numbers.var(1) - 1 / 12).abs() < 0.005).all()
    flat = numbers.permute(1, 0, 2).flatten(1)  # by row: 36 numbers each
    off_diagonal = torch.corrcoef(flat.T) - torch.eye(36)
    assert off_diagonal.abs().max() < 0.08


def test_the_numbers_are_those_of_splitmix64() -> None:
    """The reference implementation's first outputs for the seed 1234567."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
    ]
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64
        states = np.uint64(1234567) + np.arange(4, dtype=np.uint64) * _STEP
        assert _mixed(states).tolist() == expected


def test_the_first_samples_are_the_same_samples() -> None:
    """Fewer of them, and never more than there are."""
    samples = Numbered(10)
    first = first_samples(samples, 4)
    rows = torch.arange(4)

    assert first.num_samples == 4
    assert first.fingerprint == samples.fingerprint
    assert torch.equal(first.inputs(rows, None), samples.inputs(rows, None))
    assert torch.equal(first.targets(rows, None), samples.targets(rows, None))
    assert first_samples(samples, None) is samples
    assert first_samples(samples, 10) is samples


def test_a_copy_of_the_first_is_of_a_copy() -> None:
    """What the inner samples keep is not shared with it."""
    first = FirstSamples(Numbered(10), 4)
    assert copy(first).samples is not first.samples
    assert pickle.loads(pickle.dumps(first)) == first
