"""Orders from files, for sharded stages."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from hocket.core.formats.given import read_schedule, refuse_other_sizes
from hocket.errors import ShapeError
from hocket.passes.add_gathers import add_gathers
from hocket.schedules import make_schedule


def test_an_order_of_shards_is_for_shards(tmp_path: Path) -> None:
    """Text says how many; CSV does not, and is read for as many as are wanted."""
    schedule = make_schedule("1f1b", num_devices=2, num_microbatches=4, num_shards=2)
    text, cells = tmp_path / "order.txt", tmp_path / "order.csv"
    text.write_text(str(schedule))
    schedule.to_csv(cells)

    assert read_schedule(text) == schedule
    assert add_gathers(read_schedule(cells, num_shards=2)) == schedule
    compare = partial(
        refuse_other_sizes,
        schedule.program,
        num_devices=2,
        num_microbatches=4,
        num_replicas=1,
    )
    compare(num_shards=2)
    with pytest.raises(ShapeError, match=r"2 shards, not 1 \(num_shards\)"):
        compare()
