"""Which orders flush, and so have one gate over all trained stages."""

from __future__ import annotations

import pytest

from hocket.core.gates import flushes, gates_of
from hocket.core.schedule import Schedule
from hocket.schedules import make_schedule

HEAD = """steps 3
net t microbatches=1
net s microbatches=1
stage 0 net=t device=0 trainable=no{follows}
stage 1 net=s device=0
stage 2 net=s device=1
flow 1>2
flow 0>2
"""
FROZEN, MOVING = HEAD.format(follows=""), HEAD.format(follows=" delay=1 follows=1")
AHEAD = """repeats 2
d0  0F0 |: 1F0 0F0@1 1B0 1U 1F0@1 0F0@2 1B0@1 1U@1 :| 1F0@2 1B0@2 1U@2
d1  |: 2F0 2B0 2U 2F0@1 2B0@1 2U@1 :| 2F0@2 2B0@2 2U@2"""
MOVES = """repeats 1
d0  0F0 |: 1F0 0F0@1 1B0 1U 0U :| 1F0@1 0F0@2 1B0@1 1U@1 0U@1 1F0@2 1B0@2 1U@2 0U@2
d1  |: 2F0 2B0 2U :| 2F0@1 2B0@1 2U@1 2F0@2 2B0@2 2U@2"""
# The body of device 1 is the step before.
BEHIND = """repeats 1
d0  0F0 1F0 0F0@1 1B0 1U |: 1F0@1 0F0@2 1B0@1 1U@1 :| 1F0@2 1B0@2 1U@2
d1  |: 2F0 2B0 2U :| 2F0@1 2B0@1 2U@1 2F0@2 2B0@2 2U@2"""
# The student's forward of the next step stands before the last update of this one.
EARLY = """net s microbatches=1
stage 0 net=s device=0
stage 1 net=s device=0
flow 0>1
steps 3
repeats 2
d0  0F0 1F0 1B0 0B0 0U |: 0F0@1 1U 1F0@1 1B0@1 0B0@1 0U@1 0F0@2 1U@1 1F0@2 1B0@2 \
0B0@2 0U@2 :| 1U@2"""


@pytest.mark.parametrize("text", [FROZEN + AHEAD, MOVING + MOVES])
def test_a_filled_order_flushes(text: str) -> None:
    """Only forwards of the teacher are of another step than the rest of the body."""
    schedule = Schedule.parse(text)
    assert flushes(schedule)
    assert gates_of(schedule, clips=False) == ((1, 2),)


@pytest.mark.parametrize("text", [FROZEN + BEHIND, EARLY])
def test_an_order_whose_steps_overlap_has_a_gate_for_each_stage(text: str) -> None:
    """One gate would make a device wait in a portion for what a later one brings."""
    schedule = Schedule.parse(text)
    assert not flushes(schedule)
    assert all(len(gate) == 1 for gate in gates_of(schedule, clips=False))


def test_delays_are_no_flushes() -> None:
    """Stale weights are read because steps overlap, with and without a body."""
    for name in ("wpipe", "pipedream-2bw"):
        order = make_schedule(name, num_devices=2, num_microbatches=2, num_steps=6)
        assert not flushes(order)
        assert not flushes(Schedule(order.program, order.lanes))


@pytest.mark.parametrize("num_steps", [1, 3])
def test_steps_in_sequence_flush(num_steps: int) -> None:
    """Without a body, too."""
    shape = {"num_devices": 2, "num_microbatches": 2, "num_steps": num_steps}
    assert flushes(make_schedule("1f1b", **shape))
    order = Schedule.parse(FROZEN + BEHIND)
    assert flushes(Schedule(order.program, order.lanes))
    order = Schedule.parse(EARLY)
    assert not flushes(Schedule(order.program, order.lanes))
