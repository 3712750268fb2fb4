"""The checker's fast ways find what its slow ones find, to the word."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hocket.core.check import check, play
from hocket.core.checker.faults import each_op_fault, is_complete
from hocket.core.checker.happens_before import HappensBefore
from hocket.core.costs import Costs
from hocket.core.op import Op
from hocket.core.schedule import Schedule
from hocket.core.simulator.work import prepare
from hocket.errors import DeadlockError, ScheduleError
from hocket.passes.add_messages import add_messages
from hocket.schedules import SCHEDULES
from tests.core.random_orders import orders as orders_with_messages
from tests.core.support.slow_check import WholeClocks, buffers_or_stuck
from tests.strategies import accepted, lane_orders

many = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])


def shuffled(schedule: Schedule, rng: Random) -> Schedule:
    """The same ops; in one lane, two neighbours or any two changed places."""
    number = rng.randrange(len(schedule.lanes))
    ops = list(schedule.lanes[number].ops)
    if len(ops) > 1:
        i = rng.randrange(len(ops) - 1)
        j = rng.choice((i + 1, rng.randrange(len(ops))))
        ops[i], ops[j] = ops[j], ops[i]
    lanes = [*schedule.lanes]
    lanes[number] = replace(lanes[number], ops=tuple(ops))
    return replace(schedule, lanes=tuple(lanes))


def damaged(schedule: Schedule, rng: Random) -> Schedule:
    """An op is dropped, doubled, put in another lane, or has another number."""
    lanes = [list(lane.ops) for lane in schedule.lanes]
    ops = rng.choice([ops for ops in lanes if ops])
    i = rng.randrange(len(ops))
    match rng.randrange(4):
        case 0:
            del ops[i]
        case 1:
            ops.insert(i, rng.choice(ops))
        case 2:
            rng.choice(lanes).append(ops.pop(i))
        case _:
            ops[i] = _other(ops[i], rng)
    return replace(
        schedule,
        lanes=tuple(
            replace(lane, ops=tuple(ops))
            for lane, ops in zip(schedule.lanes, lanes, strict=True)
        ),
    )


def _other(op: Op, rng: Random) -> Op:
    name = rng.choice(("kind", "stage", "microbatch", "step", "peer"))
    if name == "kind":
        return replace(op, kind=rng.choice(list(type(op.kind))))
    number = rng.choice((None, -1, 0, 1, 2, 3, 2**70))
    if name in ("stage", "step") and number is None:
        number = 0
    changes: dict[str, Any] = {name: number}
    return replace(op, **changes)


def assert_plays_as_slow(schedule: Schedule, num_buffers: int | None) -> None:
    """Compare the fewest buffers, or where all lanes stand."""
    played = play(prepare(schedule, Costs.uniform()), num_buffers)

    expected = buffers_or_stuck(schedule, num_buffers)
    assert (played.num_buffers, [str(stand) for stand in played.stuck]) == expected


@many
@given(
    st.one_of(lane_orders(), orders_with_messages()),
    st.randoms(use_true_random=False),
    st.sampled_from([None, None, 1, 2]),
)
def test_finds_the_fewest_buffers_in_one_run(
    schedule: Schedule, rng: Random, num_buffers: int | None
) -> None:
    """A buffer more is added where lanes stand; they need not begin anew."""
    assert_plays_as_slow(schedule, num_buffers)
    assert_plays_as_slow(shuffled(schedule, rng), num_buffers)


@many
@given(st.one_of(lane_orders(), orders_with_messages()))
def test_clocks_of_shared_devices_are_enough(schedule: Schedule) -> None:
    """Every pair of ops of one device is ordered as clocks of all lanes order it."""
    work = prepare(schedule, Costs.uniform())
    order = play(work).order
    fast = HappensBefore(work.columns, work.needs, order)
    slow = WholeClocks(schedule, order)

    device = work.columns.device.tolist()
    pairs = [(a, b) for a, b in permutations(order, 2) if device[a] == device[b]]
    assert [fast.before(*pair) for pair in pairs] == [
        slow.before(*pair) for pair in pairs
    ]


@many
@given(
    st.one_of(lane_orders(), orders_with_messages()),
    st.randoms(use_true_random=False),
    st.integers(1, 2),
)
def test_ops_are_counted_as_they_are_looked_at_one_by_one(
    schedule: Schedule, rng: Random, num_times: int
) -> None:
    """All is well only if no op is at fault; damage is never overlooked."""
    assert is_complete(schedule)
    for _ in range(num_times):
        schedule = damaged(schedule, rng)

    assert is_complete(schedule) <= (not list(each_op_fault(schedule)))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_is_found_right_both_ways(name: str) -> None:
    """Complete, with the fewest buffers; with messages as ops, too."""
    for shape in accepted(name)[::7]:
        schedule = SCHEDULES[name].make(replace(shape, num_steps=2, num_replicas=2))
        assert is_complete(schedule)
        assert not list(each_op_fault(schedule))
        assert_plays_as_slow(schedule, None)
        full = add_messages(schedule)
        assert is_complete(full)
        assert not list(each_op_fault(full))
        assert_plays_as_slow(full, None)
        assert check(full).num_versions == check(schedule).num_versions


def test_more_buffers_are_of_no_use_where_values_are_missing() -> None:
    """Lanes that first wait for buffers may still come to stand for ever."""
    text = "d0 0F0 0F1 0B0 0B1 0U\nd1 1F1 1B1 1B0 1F0 1U"
    schedule = Schedule.parse(text)

    with pytest.raises(DeadlockError) as caught:
        check(schedule)
    _, stuck = buffers_or_stuck(schedule)
    assert caught.value.faults[1:] == tuple(stuck)
    assert "1B0 and needs" in stuck[-1]


def test_a_number_too_large_to_count_is_a_fault() -> None:
    """Not an overflow of a column."""
    schedule = Schedule.parse("d0 0F0 0B0 0U")
    lanes = (replace(schedule.lanes[0], ops=(*schedule.lanes[0].ops, Op.parse("0F0"))),)
    huge = replace(lanes[0].ops[-1], step=2**70)
    lanes = (replace(lanes[0], ops=(*lanes[0].ops[:-1], huge)),)

    with pytest.raises(ScheduleError, match="is no op of this program"):
        check(replace(schedule, lanes=lanes))
