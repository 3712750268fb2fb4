"""Microbatches of nets that share a batch nest, whatever the number of samples."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import DataError
from hocket.run.data.reads import even_sizes
from hocket.run.engine.programs.part_sizes import nested_sizes

few = st.integers(1, 4)


@given(first=few, finer=few, coarser=few, num_replicas=few, rest=st.integers(0, 60))
def test_boundaries_of_coarser_parts_are_boundaries_of_finer_ones(
    first: int, finer: int, coarser: int, num_replicas: int, rest: int
) -> None:
    """All samples are in one part each, and replicas have the same rows in all nets."""
    counts = first * coarser, first * coarser * finer, first
    num_samples = 4 * max(counts) * num_replicas + rest
    sizes = nested_sizes(num_samples, (*counts, 1), num_replicas)
    begins = {count: {0, *accumulate(sizes[count])} for count in (1, *counts)}
    assert begins[1] <= begins[counts[2]] <= begins[counts[0]] <= begins[counts[1]]
    for count in counts:
        assert len(sizes[count]) == count * num_replicas
        assert sum(sizes[count]) == num_samples
        assert min(sizes[count]) > 0
    assert sizes[counts[0]] == even_sizes(num_samples, counts[0] * num_replicas)


@given(counts=st.lists(st.integers(1, 12), min_size=2, max_size=4), rest=few)
def test_any_multiple_of_a_number_of_parts_nests_in_it(
    counts: list[int], rest: int
) -> None:
    """Also where the first net's is neither: 6 in 2 and in 3, of a batch cut in 2."""
    num_samples = 6 * max(counts) + rest
    sizes = nested_sizes(num_samples, counts, 1)
    for coarse in counts:
        for fine in counts:
            if fine % coarse == 0:
                begins = {0, *accumulate(sizes[fine])}
                assert begins.issuperset(accumulate(sizes[coarse])), (coarse, fine)


def test_ten_samples_as_in_the_picture() -> None:
    """`tensor_split` into six parts would begin the third at row 4, not the second."""
    sizes = nested_sizes(10, (3, 6), 1)
    assert sizes[3] == (4, 3, 3)
    assert sizes[6] == (2, 2, 2, 1, 2, 1)


def test_a_part_without_a_sample_is_refused() -> None:
    """Seven samples in four parts; one of them cannot be cut in two."""
    with pytest.raises(
        DataError, match="smallest has 1: it cannot be cut for a net with 8"
    ):
        nested_sizes(7, (4, 8), 1)
