"""The blocks of V-Half and V-Min, and what comes of repeating and squeezing them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.core.costs import Costs
from hocket.core.op import Kind, Op
from hocket.core.simulate import simulate
from hocket.schedules import Shape, make_schedule, v_half, v_min
from hocket.schedules.building_block import PERIOD, Block

BLOCKS: Final[dict[str, Callable[[Shape, int], Block]]] = {
    "v-half": v_half.block_of,
    "v-min": v_min.block_of,
}
every_block = pytest.mark.parametrize("name", sorted(BLOCKS))


@every_block
@given(p=st.integers(1, 40), data=st.data())
def test_no_two_ops_stand_in_one_slot(name: str, p: int, data: st.DataObject) -> None:
    """Else the repeated blocks of a device would meet."""
    device = data.draw(st.integers(0, p - 1))
    slots = BLOCKS[name](Shape(p, 1, 2), device)
    assert {slot % PERIOD for slot in slots.values()} == set(range(PERIOD))


@every_block
@given(p=st.integers(1, 40))
def test_blocks_follow_each_other_on_a_microbatchs_way(name: str, p: int) -> None:
    """Each op stands after those whose results it needs."""
    slots: dict[tuple[Kind, int], int] = {}
    for device in range(p):
        slots |= BLOCKS[name](Shape(p, 1, 2), device)
    way = [
        *((Kind.FORWARD, stage) for stage in range(2 * p)),
        *((Kind.BACKWARD_INPUT, stage) for stage in reversed(range(2 * p))),
    ]
    assert all(slots[before] < slots[after] for before, after in pairwise(way))
    for stage in range(2 * p):
        assert slots[Kind.BACKWARD_INPUT, stage] < slots[Kind.BACKWARD_WEIGHT, stage]


@pytest.mark.parametrize(
    ("name", "most"),
    [("v-half", lambda p: (p + 2) // 2), ("v-min", lambda p: (p + 4) // 3)],
)
@pytest.mark.parametrize("p", [2, 3, 4, 5, 6, 8, 16])
def test_activations_are_as_many_as_the_authors_say(
    name: str, most: Callable[[int], int], p: int
) -> None:
    """In units of a device's whole share, from F to W, where 1F1B holds `p` of them."""
    schedule = make_schedule(name, num_devices=p, num_microbatches=3 * p)
    held = [max(accumulate(map(taken, lane.ops))) for lane in schedule.lanes]
    assert max(held) == 2 * most(p)


def taken(op: Op) -> int:
    """By how many microbatches more than before a device holds a part of."""
    return (op.kind is Kind.FORWARD) - (op.kind is Kind.BACKWARD_WEIGHT)


@every_block
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_squeezing_delays_nothing(name: str, p: int) -> None:
    """F and I end no later than in the repeated blocks."""
    schedule = make_schedule(name, num_devices=p, num_microbatches=3 * p)
    slot_s = 1 / 2
    for span in simulate(schedule, Costs.uniform()).spans:
        op, device = span.op, schedule.lanes[span.lane].device
        if op.microbatch is not None and op.kind is not Kind.BACKWARD_WEIGHT:
            slots = BLOCKS[name](Shape(p, 1, 2), device)
            slot = slots[op.kind, op.stage] + PERIOD * op.microbatch
            assert span.end_s <= (slot + 1) * slot_s
