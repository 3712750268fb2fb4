"""Portions put together are the order, for any number of steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hocket.core.check import check
from hocket.core.dataflow import Value, is_given, makes, needs
from hocket.core.op import Op
from hocket.core.plans.lane_plan import Portions, align_bodies, portions
from hocket.core.schedule import Schedule
from hocket.errors import PlanError
from hocket.schedules import make_schedule

SHAPES = [
    ("pipedream-2bw", 1, 2),
    ("pipedream-2bw", 3, 3),
    ("pipedream-2bw", 4, 9),
    ("wpipe", 2, 2),
    ("wpipe", 4, 5),
    ("wpipe-overlapped", 2, 2),
    ("wpipe-overlapped", 4, 8),
    ("pipedream", 4, 1),
]


def order(name: str, p: int, m: int, *, num_steps: int, num_replicas: int) -> Schedule:
    """Of a name."""
    return make_schedule(
        name,
        num_devices=p,
        num_microbatches=m,
        num_steps=num_steps,
        num_replicas=num_replicas,
    )


def played(parts: Portions, lane: int, num_bodies: int) -> list[Op]:
    """What a worker plays that goes on `num_bodies` times."""
    ops = list(parts.prologue[lane])
    for r in range(num_bodies):
        ops += [replace(op, step=op.step + r) for op in parts.body[lane]]
    return ops + [replace(op, step=op.step + num_bodies) for op in parts.epilogue[lane]]


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize(("name", "p", "m"), SHAPES)
def test_together_they_are_the_order(
    name: str, p: int, m: int, num_replicas: int
) -> None:
    """Prologue, as many bodies as there are further batches, epilogue."""
    parts = portions(order(name, p, m, num_steps=9, num_replicas=num_replicas))
    for num_bodies in (0, 1, 4):
        num_steps = parts.num_steps + num_bodies
        whole = order(name, p, m, num_steps=num_steps, num_replicas=num_replicas)
        for i, lane in enumerate(whole.lanes):
            assert played(parts, i, num_bodies) == list(lane.ops)


@pytest.mark.parametrize(("name", "p", "m"), SHAPES)
def test_a_step_has_ended_where_no_lane_has_more_of_it(
    name: str, p: int, m: int
) -> None:
    """The next step has not ended; each repetition ends one more."""
    parts = portions(order(name, p, m, num_steps=9, num_replicas=1))
    for r in range(3):
        rest = [op.step + r for ops in parts.body for op in ops]
        rest += [op.step + r for ops in parts.epilogue for op in ops]
        assert min(rest) == parts.num_ended + r
    assert parts.num_ended >= 1


@pytest.mark.parametrize(("name", "p", "m"), SHAPES)
def test_a_repetition_begins_with_the_next_batch_only(
    name: str, p: int, m: int
) -> None:
    """The prologue takes no more batches than it says, each repetition one."""
    parts = portions(order(name, p, m, num_steps=9, num_replicas=1))
    assert max(op.step for ops in parts.prologue for op in ops) < parts.num_steps
    assert max(op.step for ops in parts.body for op in ops) <= parts.num_steps


@pytest.mark.parametrize(("name", "p", "m"), SHAPES)
def test_no_lane_needs_what_another_plays_in_a_later_portion(
    name: str, p: int, m: int
) -> None:
    """Workers may wait for each other at the end of each portion."""
    whole = order(name, p, m, num_steps=9, num_replicas=1)
    parts = portions(whole)
    num_bodies = whole.program.num_steps - parts.num_steps
    made: dict[Value, int] = {}
    needed: list[tuple[Value, int]] = []
    for i in range(p):
        sizes = [len(parts.prologue[i]), *[len(parts.body[i])] * num_bodies]
        portion_of = [r for r, size in enumerate(sizes) for _ in range(size)]
        for place, op in enumerate(whole.lanes[i].ops):
            portion = portion_of[place] if place < len(portion_of) else len(sizes)
            made |= dict.fromkeys(makes(op, whole.program), portion)
            needed += [(value, portion) for value in needs(op, whole.program)]
    assert all(made.get(value, 0) <= portion for value, portion in needed)


def test_an_order_without_a_body_has_none() -> None:
    """Each of its steps is played alone."""
    with pytest.raises(PlanError, match="no portions"):
        portions(make_schedule("1f1b", num_devices=2, num_microbatches=2))


LATE_LANE = """
steps 3
net n0 microbatches=1
net n1 microbatches=1
stage 0 net=n0 device=0 trainable=no
stage 1 net=n1 device={device}
flow 0>1
{early}  1F0 1B0 1U |: 1F0@1 1B0@1 1U@1 :| 1F0@2 1B0@2 1U@2
{late}   |: 0F0 :| 0F0@1 0F0@2
"""


@pytest.mark.parametrize(
    ("device", "early", "late"), [(0, "d0", "d0.1"), (1, "d1", "d0")]
)
def test_no_lane_needs_what_is_made_in_a_later_portion(
    device: int, early: str, late: str
) -> None:
    """The body of the lane that is behind begins later; the order stays the same."""
    order = Schedule.parse(LATE_LANE.format(device=device, early=early, late=late))
    check(order)

    aligned = align_bodies(order)

    same = order.with_num_steps(aligned.program.num_steps)
    assert [lane.ops for lane in aligned.lanes] == [lane.ops for lane in same.lanes]
    check(aligned)
    program = aligned.program
    made: set[Value] = set()
    parts = portions(aligned)
    for part in (parts.prologue, parts.body):
        made.update(value for ops in part for op in ops for value in makes(op, program))
        for op in (op for ops in part for op in ops):
            assert {v for v in needs(op, program) if not is_given(v)} <= made
    assert align_bodies(aligned) is aligned
