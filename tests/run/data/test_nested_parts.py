"""Microbatches of nets that share a batch nest, whatever the number of samples."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import DataError
from hocket.run.data.nested_parts import nested_sizes
from hocket.run.data.reads import even_sizes

few = st.integers(1, 4)


@given(first=few, finer=few, coarser=few, num_replicas=few, rest=st.integers(0, 60))
def test_boundaries_of_coarser_parts_are_boundaries_of_finer_ones(
    first: int, finer: int, coarser: int, num_replicas: int, rest: int
) -> None:
    """All samples are in one part each, and replicas have the same rows in all nets."""
    counts = first * coarser, first * coarser * finer, first
    num_samples = max(counts) * num_replicas + rest
    sizes = nested_sizes(num_samples, counts, num_replicas)
    begins = {count: {0, *accumulate(sizes[count])} for count in (1, *counts)}
    assert begins[1] <= begins[counts[2]] <= begins[counts[0]] <= begins[counts[1]]
    for count in counts:
        assert len(sizes[count]) == count * num_replicas
        assert sum(sizes[count]) == num_samples
        assert min(sizes[count]) > 0
    assert sizes[counts[0]] == even_sizes(num_samples, counts[0] * num_replicas)


def test_ten_samples_as_in_the_picture() -> None:
    """`tensor_split` into six parts would begin the third at row 4, not the second."""
    sizes = nested_sizes(10, (3, 6), 1)
    assert sizes[3] == (4, 3, 3)
    assert sizes[6] == (2, 2, 2, 1, 2, 1)


def test_a_part_without_a_sample_is_refused() -> None:
    """Seven samples in four parts; one of them cannot be cut in two."""
    with pytest.raises(DataError, match="smallest has 1: it cannot be cut into 2"):
        nested_sizes(7, (4, 8), 1)
