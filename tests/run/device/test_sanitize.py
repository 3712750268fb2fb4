"""Races are found at run time in each interleaving; ordered accesses never raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.errors import RaceError
from hocket.run.device.cpu import CpuDevice
from hocket.run.device.sanitize import Sanitizer
from tests.run.device.support.interleaver import Interleaver, ScheduleChoice
from tests.run.device.support.lane_plans import (
    PlannedOp,
    lane_plans,
    play,
    racing_pairs,
)

NUM_LANES = 3


def played(
    plan: list[PlannedOp], seed: int, draw: ScheduleChoice
) -> tuple[str, str] | None:
    """The two ops of the race that is found in one interleaving, if any."""
    sanitizer = Sanitizer(NUM_LANES)
    scheduler = Interleaver(seed, NUM_LANES, draw)
    try:
        with CpuDevice(
            NUM_LANES,
            budget_bytes=1,
            timeout_s=20.0,
            scheduler=scheduler,
            sanitizer=sanitizer,
        ) as device:
            play(plan, device, sanitizer)
    except RaceError as error:
        return error.ops
    return None


@settings(max_examples=60, deadline=None)
@given(plan=lane_plans(NUM_LANES), seed=st.integers(0, 1 << 16))
def test_races_are_those_that_no_path_of_events_orders(
    plan: list[PlannedOp], seed: int
) -> None:
    """By a transitive closure over random ops, waits and accesses.

    Every interleaving of a plan with a race finds one of its races, and no interleaving
    of a plan without one finds anything.
    """
    racing = racing_pairs(plan)
    for draw in ScheduleChoice:
        for i in range(3):
            found = played(plan, seed + i, draw)
            if racing:
                assert found in racing | {(b, a) for a, b in racing}
            else:
                assert found is None


# Lane 0 has a stage's input gradient and its update, lane 1 the weight gradient.
SPLIT_BACKWARD = [
    PlannedOp(0, 0, frozenset(), (("the weights", False), ("y", True))),
    PlannedOp(1, 1, frozenset({0}), (("y", False), ("the gradients", True))),
    PlannedOp(2, 0, frozenset(), (("the weights", False),)),
    PlannedOp(3, 0, frozenset({1}), (("the gradients", False), ("the weights", True))),
]


def test_an_order_with_all_its_waits_never_raises() -> None:
    """In two hundred interleavings."""
    for seed in range(100):
        assert played(SPLIT_BACKWARD, seed, ScheduleChoice.PCT) is None
        assert played(SPLIT_BACKWARD, seed, ScheduleChoice.UNIFORM) is None


@pytest.mark.parametrize(
    ("op", "race"), [(1, {"op0", "op1"}), (3, {"op1", "op3"})], ids=["W", "U"]
)
def test_a_forgotten_wait_is_found_in_each_interleaving(
    op: int, race: set[str]
) -> None:
    """Not only in those in which the ops run in the wrong order."""
    plan = [*SPLIT_BACKWARD]
    plan[op] = replace(plan[op], waits=frozenset())
    for seed in range(50):
        assert set(played(plan, seed, ScheduleChoice.PCT) or ()) == race
        assert set(played(plan, seed, ScheduleChoice.UNIFORM) or ()) == race


def test_the_error_names_ops_lanes_and_resource() -> None:
    """And what to do; they are attributes, too."""
    sanitizer = Sanitizer(2)
    sanitizer.access(0, "0F1", "the output of stage 0", writes=True)
    with pytest.raises(RaceError) as caught:
        sanitizer.access(1, "0W1", "the output of stage 0", writes=False)

    assert str(caught.value).startswith(
        "0F1 in lane 0 writes the output of stage 0, and 0W1 in lane 1 reads it"
    )
    assert "let 0W1 wait for an event that 0F1" in str(caught.value)
    assert caught.value.resource == "the output of stage 0"
    assert caught.value.ops == ("0F1", "0W1")
    assert caught.value.lanes == (0, 1)


def test_two_lanes_may_read_at_once() -> None:
    """Then a write must come after both of them."""
    sanitizer = Sanitizer(3)
    sanitizer.access(0, "a", "w", writes=False)
    sanitizer.access(1, "b", "w", writes=False)
    sanitizer.wait(2, sanitizer.record(1))
    with pytest.raises(RaceError) as caught:
        sanitizer.access(2, "c", "w", writes=True)

    assert caught.value.ops == ("a", "c")


def test_an_event_orders_what_came_before_it_alone() -> None:
    """What its lane did afterwards may still be going on."""
    sanitizer = Sanitizer(2)
    event = sanitizer.record(0)
    sanitizer.access(0, "late", "w", writes=True)
    sanitizer.wait(1, event)
    with pytest.raises(RaceError):
        sanitizer.access(1, "reader", "w", writes=False)


def join_and_fork(sanitizer: Sanitizer) -> None:
    """The caller's stream waits for all lanes, and then all lanes for it."""
    sanitizer.join()
    sanitizer.fork()


@pytest.mark.parametrize(
    ("between", "is_race"),
    [
        (Sanitizer.synchronize, False),
        (join_and_fork, False),
        (Sanitizer.join, True),
        (Sanitizer.fork, True),
    ],
)
def test_steps_are_ordered_by_the_caller(
    between: Callable[[Sanitizer], None], is_race: bool
) -> None:
    """Where it waits for all lanes, or joins and forks them; one of these is half."""
    sanitizer = Sanitizer(2)
    sanitizer.access(0, "U of step 0", "w", writes=True)
    between(sanitizer)
    read = partial(sanitizer.access, 1, "0F0 of step 1", "w", writes=False)
    if is_race:
        with pytest.raises(RaceError):
            read()
    else:
        read()


def test_a_join_orders_what_came_before_it_alone() -> None:
    """A lane that works on while the caller does is not waited for by a later fork."""
    sanitizer = Sanitizer(2)
    sanitizer.join()
    sanitizer.access(0, "late", "w", writes=True)
    sanitizer.fork()
    with pytest.raises(RaceError):
        sanitizer.access(1, "0F0", "w", writes=False)
