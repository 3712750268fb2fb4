"""Updates behind all else, for orders that have them earlier."""

from __future__ import annotations

import pytest

from hocket.core.check import check
from hocket.core.op import Kind
from hocket.core.schedule import Schedule
from hocket.passes.playable_order import updates_last
from hocket.schedules import SCHEDULES, make_schedule

EARLY = """\
d0  0F0 2F0 2B0 0F1 2F1 2B1 2U 0B0 0B1 0U
d1  1F0 3F0 3B0 1F1 3F1 3B1 3U 1B0 1B1 1U
"""


def test_moves_updates_and_nothing_else() -> None:
    """A schedule that passes the check still passes it."""
    early = Schedule.parse(EARLY)
    late = updates_last(early)
    check(early)
    check(late)
    for before, after in zip(early.lanes, late.lanes, strict=True):
        assert sorted(map(str, before.ops)) == sorted(map(str, after.ops))
        kinds = [op.kind is Kind.UPDATE for op in after.ops]
        assert kinds == sorted(kinds)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs"])
def test_leaves_our_own_orders_as_they_are(name: str) -> None:
    """Published schedules have their updates last already."""
    assert name in SCHEDULES
    order = make_schedule(name, num_devices=2, num_microbatches=4, num_replicas=2)
    assert updates_last(order) == order
