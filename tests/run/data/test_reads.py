"""A batch in parts: each worker has its own rows, and they are cut as the whole is."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import DataError
from hocket.run.data.batch import count_samples, digest, split_batch
from hocket.run.data.reads import PartBatch, ReadSpec, begin_of, parts_of

sizes = st.integers(1, 60)
few = st.integers(1, 6)


def reads_of(replica: int, num_microbatches: int, num_replicas: int) -> ReadSpec:
    """Of a worker that needs both sides."""
    return ReadSpec(
        inputs=True,
        targets=True,
        num_microbatches=num_microbatches,
        num_replicas=num_replicas,
        replica=replica,
        device=torch.device("cpu"),
    )


@given(num_samples=sizes, num_parts=sizes)
def test_parts_begin_where_torch_splits(num_samples: int, num_parts: int) -> None:
    """`tensor_split` is what cuts whole batches."""
    parts = torch.arange(num_samples).tensor_split(num_parts)
    begins = [begin_of(i, num_samples, num_parts) for i in range(num_parts + 1)]
    assert begins[0] == 0
    assert begins[-1] == num_samples
    sizes_of_parts = [end - begin for begin, end in pairwise(begins)]
    assert sizes_of_parts == [len(part) for part in parts]


@given(num_samples=sizes, num_microbatches=few, num_replicas=few)
def test_replicas_share_each_batch(
    num_samples: int, num_microbatches: int, num_replicas: int
) -> None:
    """Every row is read by one replica, whatever the batch's size."""
    taken: list[int] = []
    for replica in range(num_replicas):
        reads = reads_of(replica, num_microbatches, num_replicas)
        taken += range(num_samples)[reads.rows(num_samples)]
    assert taken == list(range(num_samples))


@given(num_samples=sizes, num_microbatches=few, num_replicas=few)
def test_a_part_is_cut_as_the_whole_batch_is(
    num_samples: int, num_microbatches: int, num_replicas: int
) -> None:
    """The replica's microbatches are equal, those of others have the same sizes."""
    batch = torch.rand(num_samples, 3), torch.arange(num_samples)
    num_parts, each = parts_of(num_samples, num_microbatches, num_replicas)
    whole = split_batch(batch, num_parts)
    for replica in range(num_replicas):
        rows = reads_of(replica, num_microbatches, num_replicas).rows(num_samples)
        part = PartBatch(num_samples, 0, rows, batch[0][rows], batch[1][rows])
        cut = split_batch(part, num_parts)

        assert [m.num_samples for m in cut] == [m.num_samples for m in whole]
        own = slice(replica * each, (replica + 1) * each)
        for mine, theirs in zip(cut[own], whole[own], strict=True):
            assert torch.equal(mine.leaves[0], theirs.leaves[0])
            assert torch.equal(mine.targets, theirs.targets)
        assert all(not m.leaves for m in (*cut[: own.start], *cut[own.stop :]))


def test_a_side_that_is_not_needed_is_not_there() -> None:
    """A stage between has neither inputs nor targets, but the number of samples."""
    part = PartBatch(8, 5, slice(0, 8), None, None)
    cut = split_batch(part, 4)
    assert [(m.leaves, m.targets, m.num_samples) for m in cut] == [((), None, 2)] * 4
    assert count_samples(part) == 8
    assert digest(part) == 5


def test_a_part_of_too_small_a_batch_is_refused() -> None:
    """As the whole would be."""
    part = PartBatch(3, 0, slice(0, 3), torch.rand(3, 2), torch.arange(3))
    with pytest.raises(DataError, match="3 samples cannot be cut into 4 microbatches"):
        split_batch(part, 4)


def test_a_data_set_that_gives_other_rows_is_refused() -> None:
    """One for each row that was asked for, of each tensor."""
    part = PartBatch(4, 0, slice(0, 4), torch.rand(4, 2), torch.arange(3))
    with pytest.raises(DataError, match="gave 3 samples where 4 rows were asked for"):
        split_batch(part, 2)
