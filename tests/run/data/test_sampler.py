"""The order of samples: each once per epoch, and gone on from without a seam."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from hocket.errors import DataError
from hocket.run.data.sampler import ResumableSampler

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**32 - 1)


def passed(sampler: ResumableSampler) -> Iterator[list[int]]:
    """A pass in which training takes every batch."""
    return sampler.counted(sampler)


def resumed(state: dict[str, Any], batch_size: int, **settings: Any) -> Any:
    """Another sampler at the same place, by way of a file's text."""
    state = json.loads(json.dumps(state))
    sampler = ResumableSampler(
        state["num_samples"], batch_size, seed=state["seed"], **settings
    )
    sampler.load_state_dict(state)
    return sampler


@given(n=sizes, size=sizes, seed=seeds, drop=st.booleans(), shuffle=st.booleans())
def test_an_epoch_has_each_sample_once(
    n: int, size: int, seed: int, drop: bool, shuffle: bool
) -> None:
    """But for those that do not fill a batch, if they are to be left out."""
    assume(not drop or size <= n)
    sampler = ResumableSampler(n, size, seed=seed, drop_last=drop, shuffle=shuffle)
    for epoch in range(2):
        assert sampler.current.epoch == epoch
        num_batches = len(sampler)
        batches = list(passed(sampler))
        rows = [row for batch in batches for row in batch]

        assert len(batches) == num_batches == sampler.batches_per_epoch
        assert len(rows) == (n // size * size if drop else n)
        assert len(set(rows)) == len(rows)
        assert set(rows) <= set(range(n))
        assert all(len(batch) == size for batch in batches[:-1])
        assert shuffle or rows == list(range(len(rows)))


@given(n=sizes, size=sizes, seed=seeds, drop=st.booleans(), cut=st.integers(0, 200))
def test_going_on_has_no_seam(
    n: int, size: int, seed: int, drop: bool, cut: int
) -> None:
    """Stopped after any number of batches, over several epochs, by way of JSON."""
    assume(not drop or size <= n)
    total = 3 * ResumableSampler(n, size, drop_last=drop).batches_per_epoch + 1
    cut = cut % (total + 1)
    whole = ResumableSampler(n, size, seed=seed, drop_last=drop, num_batches=total)
    expected = list(passed(whole))

    first = ResumableSampler(n, size, seed=seed, drop_last=drop, num_batches=total)
    before = list(islice(passed(first), cut))
    second = resumed(first.state_dict(), size, drop_last=drop, num_batches=total)
    assert len(second) == total - cut
    assert before + list(passed(second)) == expected


@given(n=sizes, size=sizes, other=sizes, seed=seeds, cut=st.integers(0, 40))
def test_another_batch_size_repeats_and_loses_nothing(
    n: int, size: int, other: int, seed: int, cut: int
) -> None:
    """The rest of the epoch is the samples that are left, in the same order."""
    first = ResumableSampler(n, size, seed=seed)
    order = first.order(0).tolist()
    cut = cut % first.batches_per_epoch
    taken = [row for batch in islice(passed(first), cut) for row in batch]
    second = resumed(first.state_dict(), other)

    rest = [row for batch in passed(second) for row in batch]
    assert taken + rest == order


@given(n=st.integers(2, 40), seed=seeds)
def test_what_was_fetched_ahead_does_not_count(n: int, seed: int) -> None:
    """Iterating alone moves nothing: only a batch that training takes does."""
    sampler = ResumableSampler(n, 1, seed=seed)
    upcoming = iter(sampler)
    fetched = [next(upcoming) for _ in range(n)]
    assert sampler.current.position == 0

    taken = next(passed(sampler))
    assert taken == fetched[0]
    assert sampler.current.position == 1
    assert list(passed(sampler)) == fetched[1:]


def test_orders_follow_from_seed_and_epoch() -> None:
    """Others for another seed or epoch, the same for equal ones."""
    orders = {
        (seed, epoch): tuple(ResumableSampler(50, 5, seed=seed).order(epoch).tolist())
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(set(orders.values())) == len(orders)
    again = ResumableSampler(50, 7, seed=2)
    assert tuple(again.order(3).tolist()) == orders[2, 3]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_plain_dataloader_goes_on(num_workers: int) -> None:
    """A user's own DataLoader, its processes ahead of training when it stops."""
    dataset = TensorDataset(torch.arange(23))

    def loader(sampler: ResumableSampler) -> Any:
        own = DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers)
        return sampler.counted(own)

    first = ResumableSampler(23, 4, seed=5)
    before = [rows.tolist() for (rows,) in islice(loader(first), 3)]
    second = resumed(first.state_dict(), 4)
    after = [rows.tolist() for (rows,) in loader(second)]

    assert [row for rows in before + after for row in rows] == first.order(0).tolist()


def test_the_last_batch_of_an_epoch_leads_to_the_next() -> None:
    """A place kept then is not an empty rest of the old epoch."""
    sampler = ResumableSampler(7, 3, drop_last=True)
    list(passed(sampler))
    state = sampler.state_dict()
    assert (state["epoch"], state["position"], state["num_batches"]) == (1, 0, 2)
    assert len(resumed(state, 3, drop_last=True)) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_samples": 0}, "empty"),
        ({"batch_size": 0}, "a batch of 0 samples"),
        ({"batch_size": 11, "drop_last": True}, "10 samples do not fill one batch"),
        ({"seed": 2**32}, "seed 4294967296 is not from 0 to 4294967295"),
    ],
)
def test_numbers_that_make_no_batches_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    """With the numbers, before anything is trained."""
    with pytest.raises(DataError, match=message):
        ResumableSampler(**{"num_samples": 10, "batch_size": 2, **settings})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_samples": 11}, "saved with num_samples 11, and now it is 10"),
        ({"seed": 1}, "saved with seed 1, and now it is 0"),
        ({"shuffle": False}, "saved with shuffle False, and now it is True"),
        ({"position": 11}, "position 11 is behind the last of 10 samples"),
        ({"position": -1}, "natural number 'position', got -1"),
        ({"epoch": None}, "natural number 'epoch', got None"),
        ({"epoch": True}, "natural number 'epoch', got True"),
        ({"shuffle": 1}, "'shuffle' true or false, got 1"),
        ({"version": 2}, "of version 2; this hocket reads version 1"),
    ],
)
def test_a_place_that_does_not_fit_is_refused(
    change: dict[str, Any], message: str
) -> None:
    """It would repeat samples and leave out others; the place stays as it was."""
    sampler = ResumableSampler(10, 2)
    with pytest.raises(DataError, match=message):
        sampler.load_state_dict({**sampler.state_dict(), **change})
    assert sampler.state_dict() == ResumableSampler(10, 2).state_dict()
