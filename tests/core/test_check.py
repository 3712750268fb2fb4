"""The checker accepts what may run and names everything wrong with what may not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.core.check import check
from hocket.core.op import Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Lane, Schedule
from hocket.errors import DeadlockError, ScheduleError
from hocket.schedules import make_schedule

GOOD = """
d0  0F0 0F1 0B0 0B1 0U
d1  1F0 1B0 1F1 1B1 1U
"""


def of_chain(text: str, num_stages: int = 2, num_microbatches: int = 2) -> Schedule:
    """Lanes of the text with a chain program of one step, whatever the ops say."""
    lanes = []
    for device, line in enumerate(text.strip().splitlines()):
        ops = tuple(Op.parse(word) for word in line.split()[1:])
        lanes.append(Lane(device, 0, ops))
    return Schedule(Program.chain(range(num_stages), num_microbatches), tuple(lanes))


def faults_of(text: str) -> tuple[str, ...]:
    """Everything that is wrong with the lanes of the text."""
    with pytest.raises(ScheduleError) as caught:
        check(of_chain(text))
    return caught.value.faults


def test_accepts_a_right_order_and_says_what_it_needs() -> None:
    """One buffer per flow and one version of the weights are enough for 1F1B."""
    proof = check(of_chain(GOOD))

    assert proof.num_buffers == 1
    assert proof.num_versions == (1, 1)


FIRST = "d0 0F0 0F1 0B0 0B1 0U"
SECOND = "d1 1F0 1B0 1F1 1B1 1U"
SENDS = "d0 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1 0U"


@pytest.mark.parametrize(
    ("first", "second", "fault"),
    [
        # Missing, doubled, foreign and misplaced ops.
        ("d0 0F0 0F0 0B0 0B1 0U", SECOND, "0F0 is there 2 times"),
        ("d0 0F0 0F0 0B0 0B1 0U", SECOND, "0F1 is missing"),
        (f"{FIRST} 1F1", "d1 1F0 1B0 1B1 1U", "1F1 is on device 0, its stage on 1"),
        (FIRST, f"{SECOND} 9F0", "9F0 is no op of this program"),
        # A backward is either B or both I and W: else a gradient is wrong, not slow.
        (FIRST, "d1 1F0 1B0 1F1 1I1 1U", "1W1 is missing, but 1I1 is there"),
        (FIRST, "d1 1F0 1B0 1F1 1W1 1U", "1I1 is missing, but 1W1 is there"),
        (FIRST, "d1 1F0 1B0 1F1 1B1 1I1 1W1 1U", "1B1 is there, and so is 1I1"),
        (FIRST, "d1 1F0 1B0 1F1 1B1 1W1 1U", "1B1 is there, and so is 1W1"),
        (FIRST, "d1 1F0 1B0 1F1 1U", "1B1 is missing, and so are 1I1 and 1W1"),
        # A send without its receive; and what NCCL needs, one order at both ends.
        (
            "d0 0F0 0SEND_F0>1 0F1 0B0 0B1 0U",
            SECOND,
            "0SEND_F0>1 has no 1RECV_F0<0 at the other end",
        ),
        (
            SENDS,
            "d1 1RECV_F1<0 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0 1U",
            "post them in the same order at both ends",
        ),
    ],
)
def test_names_the_fault(first: str, second: str, fault: str) -> None:
    """Of each op, with what should be there."""
    assert any(fault in text for text in faults_of(f"{first}\n{second}"))


def test_names_every_fault_at_once() -> None:
    """Four mistakes are four faults, and more for what they leave out."""
    text = "d0 0F0 0F0 0B0 0B1 0U 1F1\nd1 1F0 1B0 1B1 1U 9F0"
    assert len(faults_of(text)) >= 4


def test_a_header_that_claims_too_much_costs_nothing() -> None:
    """Past bug: a hundred million claimed microbatches were listed one by one."""
    header = "steps 1\nnet model microbatches=99999999\nstage 0 net=model device=0\n"

    with pytest.raises(ScheduleError, match=r"99999999 forwards, but .* only 3 ops"):
        check(Schedule.parse(header + "d0 0F0 0B0 0U"))


def test_marks_the_ops_at_fault_in_the_picture() -> None:
    """The picture shows where the fault is."""
    with pytest.raises(ScheduleError) as caught:
        check(of_chain("d0 0F0 0F0 0F1 0B0 0B1 0U\nd1 1F0 1B0 1F1 1B1 1U"))

    assert "d0  ! 0F0 ! 0F0 0F1" in str(caught.value)


def test_names_where_each_lane_stands_in_a_deadlock() -> None:
    """Two lanes that wait for each other are both named, with what they need."""
    with pytest.raises(DeadlockError) as caught:
        check(of_chain("d0 0F0 0B0 0F1 0B1 0U\nd1 1F0 1F1 1B0 1B1 1U"))

    message = str(caught.value)
    assert "d0 stands at 0B0 and needs dx[stage 1, microbatch 0] of 1B0 on" in message
    assert "d1 stands at 1F1 and needs y[stage 0, microbatch 1] of 0F1 on" in message
    assert "d0  0F0 > 0B0 0F1" in message


def test_plays_by_the_strictest_rule_for_sends() -> None:
    """Stage 1 reads microbatch 1 first: it needs a buffer for each that came before."""
    text = "d0 0F0 0F1 0F2 0B0 0B1 0B2 0U\nd1 1F2 1F1 1F0 1B0 1B1 1B2 1U"
    schedule = of_chain(text, num_microbatches=3)

    assert check(schedule).num_buffers == 3
    with pytest.raises(
        DeadlockError, match="all 2 receive buffers there hold unread messages"
    ):
        check(schedule, num_buffers=2)


def test_an_update_between_forward_and_its_use_is_a_deadlock_of_versions() -> None:
    """Step 1 reads weights after 1 update, which this order makes too late."""
    schedule = Schedule.parse("d0 0F0 0F0@1 0B0 0U 0B0@1 0U@1")

    with pytest.raises(
        DeadlockError, match=r"weights\[stage 0, after 1 updates\] of 0U"
    ):
        check(schedule)


def test_counts_the_versions_that_a_delay_keeps_alive() -> None:
    """With delay 1 the same order is right, and holds two versions."""
    header = "steps 2\nnet model microbatches=1\nstage 0 net=model device=0 delay=1\n"
    schedule = Schedule.parse(header + "d0 0F0 0F0@1 0B0 0U 0B0@1 0U@1")

    assert check(schedule).num_versions == (2,)


def test_the_body_must_repeat_itself_one_step_later() -> None:
    """A body whose second repetition does something else is named op by op."""
    header = (
        "steps 3\nrepeats 2\nnet model microbatches=1\n"
        "stage 0 net=model device=0 delay=1\n"
    )
    text = "d0 0F0 |: 0F0@1 0B0 0U 0F0@2 0U@1 0B0@1 :| 0B0@2 0U@2"

    with pytest.raises(ScheduleError, match="0U@1 stands in the body where 0B0@1"):
        check(Schedule.parse(header + text))


@given(st.randoms(use_true_random=False), st.sampled_from(["gpipe", "1f1b"]))
def test_rejects_random_damage(rng: random.Random, name: str) -> None:
    """Dropping, doubling or moving an op to another lane never passes."""
    schedule = make_schedule(name, num_devices=3, num_microbatches=4)
    lanes = [list(lane.ops) for lane in schedule.lanes]
    lane = rng.randrange(3)
    i = rng.randrange(len(lanes[lane]))
    match rng.randrange(3):
        case 0:
            del lanes[lane][i]
        case 1:
            lanes[lane].insert(rng.randrange(len(lanes[lane])), lanes[lane][i])
        case _:
            lanes[(lane + 1) % 3].insert(0, lanes[lane].pop(i))
    damaged = tuple(
        replace(old, ops=tuple(ops))
        for old, ops in zip(schedule.lanes, lanes, strict=True)
    )

    with pytest.raises(ScheduleError):
        check(replace(schedule, lanes=damaged))


@given(st.randoms(use_true_random=False))
def test_a_swap_is_rejected_or_harmless(rng: random.Random) -> None:
    """Two ops of a lane changed places: refused, or every need still comes first."""
    schedule = make_schedule("1f1b", num_devices=3, num_microbatches=4)
    lane = rng.randrange(3)
    ops = list(schedule.lanes[lane].ops)
    i, j = rng.sample(range(len(ops)), 2)
    ops[i], ops[j] = ops[j], ops[i]
    lanes = [*schedule.lanes]
    lanes[lane] = replace(lanes[lane], ops=tuple(ops))
    try:
        check(replace(schedule, lanes=tuple(lanes)))
    except ScheduleError:
        return
    place = {(op.kind, op.microbatch): k for k, op in enumerate(ops)}
    for m in range(4):
        assert (
            place[Kind.FORWARD, m] < place[Kind.BACKWARD, m] < place[Kind.UPDATE, None]
        )
