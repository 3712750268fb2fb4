"""Which wave does what: one forward at a time, and every gradient in two updates."""

from __future__ import annotations

import pytest

from hocket.core.op import Kind, Op
from hocket.sharing.waves.order import SyncName, last_microbatch, ops_of_step


def order_of(sync: SyncName, num_steps: int, num_microbatches: int) -> str:
    """The lanes as text."""
    lanes: tuple[list[str], list[str]] = ([], [])
    for step in range(num_steps):
        for placed in ops_of_step(sync, step, num_microbatches):
            after = f"({' '.join(map(str, placed.after))})" if placed.after else ""
            lanes[placed.lane].append(f"{placed.op}{after}")
    return "\n".join(" ".join(lane) for lane in lanes)


def test_waves_as_in_the_figure() -> None:
    """Figure 9: the update of each wave reads the gradients of its own and the last."""
    assert order_of("wave", 3, 1) == (
        "0F0 0B0 0U 0F0@2(0F0@1) 0B0@2 0U@2(0B0@1 0U@1)\n0F0@1(0F0) 0B0@1 0U@1(0B0 0U)"
    )


def test_exact_waves_take_turns() -> None:
    """One update behind all backwards; forwards in the order of the plain loop."""
    assert order_of("exact", 1, 4) == (
        "0F0 0B0 0F2(0F1) 0B2 0U(0B3 0B2)\n0F1(0F0) 0B1 0F3(0F2) 0B3"
    )


@pytest.mark.parametrize("sync", ["wave", "exact"])
@pytest.mark.parametrize("num", [2, 6])
def test_no_op_waits_for_a_later_one(sync: SyncName, num: int) -> None:
    """So the ops may be issued in this order on a device that needs it."""
    seen: set[Op] = set()
    for step in range(5):
        for placed in ops_of_step(sync, step, num):
            assert set(placed.after) <= seen
            seen.add(placed.op)
            if placed.op.kind is Kind.BACKWARD:
                last = last_microbatch(sync, placed.lane, num)
                assert (placed.op.microbatch or 0) <= last
