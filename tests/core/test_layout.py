"""Layouts as one word, as published experiments write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.core.layout import WorkerLayout
from hocket.errors import PlanError

counts = st.integers(1, 999_999)


@given(num_devices=counts, num_replicas=counts, num_shards=counts)
def test_reads_what_it_writes(
    num_devices: int, num_replicas: int, num_shards: int
) -> None:
    """A layout reads what it writes, and has a worker per device."""
    layout = WorkerLayout.parse(f"{num_devices}x{num_replicas}x{num_shards}")
    assert layout == WorkerLayout(num_devices, num_replicas, num_shards)
    assert WorkerLayout.parse(str(layout)) == layout
    assert layout.num_workers == num_devices * num_replicas * num_shards


def test_one_shard_is_not_written() -> None:
    """Two numbers are what published experiments give."""
    assert WorkerLayout.parse("4x2") == WorkerLayout.parse("4x2x1")
    assert str(WorkerLayout(4, 2)) == "4x2"


@pytest.mark.parametrize(
    "word", ["", "8", "4x", "x2", "0x4", "4x0", "4x2x0", "4x2x1x1", "4 x 2"]
)
def test_refuses_what_is_none(word: str) -> None:
    """The error shows valid layouts."""
    with pytest.raises(PlanError, match="such as 8x1, 4x2 or 2x4"):
        WorkerLayout.parse(word)
