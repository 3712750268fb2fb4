"""Several lanes on one device: what `check` proves holds in every order."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hocket.core.check import check, collective_faults, conflicts, play
from hocket.core.checker.happens_before import HappensBefore, count_alive, find_accesses
from hocket.core.costs import Costs
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.core.simulator.work import prepare
from hocket.errors import ScheduleError
from tests.core.support.every_order import EveryOrder, every_order
from tests.strategies import chains, lane_orders, programs

DELAY_1 = """
steps 3
net model microbatches=1
stage 0 net=model device=0 delay=1
"""


@st.composite
def small_orders(draw: st.DrawFn, of: st.SearchStrategy[Program]) -> EveryOrder:
    """A random order in one or two lanes per device, and all that it allows."""
    found = every_order(draw(lane_orders(of)), most_states=400)
    assume(found is not None)
    assert found is not None
    return found


@given(small_orders(st.one_of(chains(), programs())))
def test_the_proof_agrees_with_every_order_tried_one_by_one(orders: EveryOrder) -> None:
    """Vector clocks find the conflicts and counts that brute force finds."""
    schedule = orders.schedule
    work = prepare(schedule, Costs.uniform())
    order = play(work, 99).order
    used = find_accesses(work.columns, schedule.program)
    before = HappensBefore(work.columns, work.needs, order)

    found = list(conflicts(work.columns, used, before, order))
    versions, gradients = count_alive(schedule.program, work.columns, used, before)

    stages = range(schedule.program.num_stages)
    assert bool(found) == bool(orders.conflicts())
    if found:
        with pytest.raises(ScheduleError, match="no path of events orders them"):
            check(schedule)
    elif list(collective_faults(work, before, order)):
        with pytest.raises(ScheduleError, match="in either order"):
            check(schedule)
    else:
        assert check(schedule).num_versions == versions
    assert versions == tuple(orders.num_versions(s) for s in stages)
    assert gradients == tuple(orders.num_gradients(s) for s in stages)


def test_two_unordered_backwards_of_one_stage_are_a_fault() -> None:
    """Past bug: both add to one gradient, from two lanes, and one sum was lost."""
    schedule = Schedule.parse("d0 0F0 0F1 0B0 0U\nd0.1 0B1")

    with pytest.raises(ScheduleError) as caught:
        check(schedule)
    (fault,) = caught.value.faults
    assert fault == (
        "0B0 on lane d0 and 0B1 on lane d0.1 both change gradients[stage 0, step 0] "
        "and no path of events orders them: put both in one lane, or let one need, "
        "directly or through other ops, a value that the other makes"
    )


def test_two_unordered_forwards_change_the_buffers_of_a_stage() -> None:
    """Batch-norm statistics would depend on which of them comes first."""
    with pytest.raises(ScheduleError, match=r"buffers\[stage 0\]"):
        check(Schedule.parse("d0 0F0 0B0 0B1 0U\nd0.1 0F1"))


def teacher_and_student(follows: str, lanes: str, delay: int = 0) -> Schedule:
    """Two microbatches of a teacher, one of its student, on one device."""
    return Schedule.parse(
        "steps 1\nnet teacher microbatches=2\nnet student microbatches=1\n"
        f"stage 0 net=teacher device=0 delay={delay} trainable=no {follows}\n"
        f"stage 1 net=student device=0\n{lanes}"
    )


@pytest.mark.parametrize("delay", [0, 1])
def test_two_unordered_forwards_change_the_buffers_of_a_moving_teacher(
    delay: int,
) -> None:
    """Past bug: accepted, though its batch-norm statistics move as the student's do."""
    lanes = "d0 0F0 1F0 1B0 1U 0U\nd0.1 0F1"
    with pytest.raises(ScheduleError, match=r"0F1 .* change buffers\[stage 0\]"):
        check(teacher_and_student("follows=1", lanes, delay))

    check(teacher_and_student("", lanes.replace(" 0U", "")))  # a frozen one


def test_an_update_may_change_the_buffers_that_a_forward_reads() -> None:
    """A follower without a delay may copy them from what it follows."""
    lanes = "d0 1F0 1B0 1U 0U\nd0.1 0F0 0F1"
    with pytest.raises(ScheduleError, match=r"buffers\[stage 0\]"):
        check(teacher_and_student("follows=1", lanes))

    check(teacher_and_student("follows=1", lanes, delay=1))


def test_a_path_may_lead_through_another_device() -> None:
    """2F0 comes before 2F1: 2B0, then 1B0 on device 1, then 1F1 stand between them."""
    program = Program.chain([0, 1, 0], 2)
    side = "d0 0F0 0F1 2F0 2B0 0B0 0B1 0U 2U\nd0.1 2F1 2B1\n"
    ordered = Schedule.parse(side + "d1 1F0 1B0 1F1 1B1 1U").lanes
    unordered = Schedule.parse(side + "d1 1F0 1F1 1B0 1B1 1U").lanes

    check(Schedule(program, ordered))
    with pytest.raises(ScheduleError) as caught:
        check(Schedule(program, unordered))
    assert len(caught.value.faults) == 2  # gradients and buffers of stage 2


def test_a_lane_goes_on_before_a_reduction_has_what_it_needs() -> None:
    """R waits for 0B0 in lane d0.1, but the forward behind R in its lane does not."""
    text = "d0 0R 0F0@1 0B0@1 0R@1 0U@1\nd0.1 0F0 0B0 0U"

    with pytest.raises(ScheduleError, match=r"0F0@1 on lane d0 .* buffers\[stage 0\]"):
        check(
            Schedule.parse(
                "replicas 2\n" + DELAY_1.replace("steps 3", "steps 2") + text
            )
        )


FOLLOWS = """
steps 2
net teacher microbatches=1
net student microbatches=1
stage 0 net=teacher device=0 delay=1 trainable=no follows=1
stage 1 net=student device=0
"""


@pytest.mark.parametrize(
    ("text", "num_versions", "num_gradients"),
    [
        # The side lane alone adds to the gradients, and U waits for its values.
        ("d0 0F0 0F1 0I0 0I1 0U\nd0.1 0W0 0W1\nd1 1F0 1F1 1B0 1B1 1U", (1, 1), (1, 1)),
        # Past bug: one was said, since U stands behind the readers in no lane.
        (f"{DELAY_1}d0 0F0 0B0 0F0@1 0B0@1 0F0@2 0B0@2\nd0.1 0U 0U@1 0U@2", (2,), (2,)),
        # One version is enough if all its readers come before the next update.
        (f"{DELAY_1}d0 0F0 0F0@1 0B0 0B0@1 0U 0F0@2 0B0@2 0U@1 0U@2", (1,), (2,)),
        # The teacher's late update reads the student's version 1: two are alive.
        (f"{FOLLOWS}d0 0F0 1F0 1B0 1U 0F0@1 0U 1F0@1 1B0@1 1U@1 0U@1", (1, 1), None),
        (f"{FOLLOWS}d0 0F0 1F0 1B0 1U 0F0@1 1F0@1 1B0@1 1U@1 0U 0U@1", (1, 2), None),
    ],
)
def test_counts_what_is_alive(
    text: str, num_versions: tuple[int, ...], num_gradients: tuple[int, ...] | None
) -> None:
    """The most versions and gradients of each stage, in any order of the lanes."""
    proof = check(Schedule.parse(text))
    assert proof.num_versions == num_versions
    assert num_gradients in (None, proof.num_gradients)
