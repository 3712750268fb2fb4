"""What is advised, by where a step's time went."""

from __future__ import annotations

from hocket.draw.where import Where, advice
from tests.draw.timelines import REAL, simulated


def test_what_takes_most_comes_first() -> None:
    """And what other programs took is theirs, before anything else is changed."""
    timeline = simulated("1f1b", 3, 4, costs=REAL)
    where = Where.of(timeline)
    alone = advice(where)
    assert any("more microbatches" in line for line in alone)
    assert not any("other programs" in line for line in alone)

    first, *rest = advice(where, core_wait_s=timeline.makespan_s / 2)
    assert first.startswith("other programs or threads have this worker's core for")
    assert rest == alone
