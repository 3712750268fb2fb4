"""What each kind of op needs and makes, in each kind of program."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given

from hocket.core.dataflow import (
    due_ops,
    is_given,
    make_rules,
    maker,
    makes,
    needs,
    version_read,
)
from hocket.core.op import MESSAGES, Kind, Op
from hocket.core.program import Net, Program, Stage
from hocket.core.schedule import Schedule
from tests.strategies import orders, programs

CHAIN = Program.chain([0, 1, 2], 2, num_steps=3)
REPLICATED = replace(CHAIN, num_replicas=2)
DELAYED = Program.chain([0, 1, 0, 1], 2, num_steps=4, delays=[1, 1, 0, 0])
BATCH_LOSS = Program.chain([0, 1], 2, num_steps=2, batch_loss=True)
FROZEN_TEACHER = Program(
    (Net("teacher", 2), Net("student", 2)),
    (
        Stage("teacher", 0, trainable=False),
        Stage("teacher", 1, trainable=False),
        Stage("student", 0),
        Stage("student", 1),
    ),
    ((0, 1), (1, 3), (2, 3)),
    num_steps=2,
)
MOMENTUM_TEACHER = Program(
    (Net("teacher", 3), Net("student", 2, batch_loss=True)),
    (
        Stage("teacher", 0, trainable=False, delay=1, follows=(2,)),
        Stage("teacher", 1, trainable=False, delay=1, follows=(3,)),
        Stage("student", 0),
        Stage("student", 1),
    ),
    ((0, 1), (1, 3), (2, 3)),
    num_steps=3,
)


def needed(text: str, program: Program) -> set[str]:
    """What an op needs, as errors would name it."""
    return {str(value) for value in needs(Op.parse(text), program)}


def made(text: str, program: Program) -> set[str]:
    """What an op makes, as errors would name it."""
    return {str(value) for value in makes(Op.parse(text), program)}


@pytest.mark.parametrize(
    ("op", "values"),
    [
        ("0F1", {"weights[stage 0, after 0 updates]"}),
        ("1F1", {"y[stage 0, microbatch 1]", "weights[stage 1, after 0 updates]"}),
        (
            "2F0@2",
            {"y[stage 1, microbatch 0, step 2]", "weights[stage 2, after 2 updates]"},
        ),
        ("2B0", {"y[stage 2, microbatch 0]", "weights[stage 2, after 0 updates]"}),
        (
            "1B0@1",
            {
                "y[stage 1, microbatch 0, step 1]",
                "dx[stage 2, microbatch 0, step 1]",
                "weights[stage 1, after 1 updates]",
            },
        ),
        ("0W1@2", {"dx[stage 0, microbatch 1, step 2]"}),
        (
            "1U",
            {
                "dw[stage 1, microbatch 0]",
                "dw[stage 1, microbatch 1]",
                "weights[stage 1, after 0 updates]",
            },
        ),
    ],
)
def test_chain_needs(op: str, values: set[str]) -> None:
    """The plain case: outputs come from before, gradients from behind."""
    assert needed(op, CHAIN) == values


@pytest.mark.parametrize(
    ("op", "values"),
    [
        ("1F1@1", {"y[stage 1, microbatch 1, step 1]"}),
        ("1B1", {"dx[stage 1, microbatch 1]", "dw[stage 1, microbatch 1]"}),
        ("1I1", {"dx[stage 1, microbatch 1]"}),
        ("1W1", {"dw[stage 1, microbatch 1]"}),
        ("1L", {"dloss[stage 1]"}),
        ("1R@2", {"reduced dw[stage 1, step 2]"}),
        ("1U@2", {"weights[stage 1, after 3 updates]"}),
        ("1SEND_F0>2", set()),
        ("2RECV_F0<1", set()),
        ("1SEND_B0>0", set()),
        ("0RECV_B0<1", set()),
    ],
)
def test_makes(op: str, values: set[str]) -> None:
    """I and W make together what B makes; messages make nothing."""
    assert made(op, CHAIN) == values


def test_a_whole_backward_is_i_and_then_w() -> None:
    """I needs what B needs; W needs I alone; both together make what B makes."""
    assert needed("1I0", CHAIN) == needed("1B0", CHAIN)
    assert needed("1W0", CHAIN) == made("1I0", CHAIN)
    assert made("1I0", CHAIN) | made("1W0", CHAIN) == made("1B0", CHAIN)


def test_messages_need_what_they_carry() -> None:
    """A send waits for its value; a receive can be posted at any time."""
    assert needed("1SEND_F0>2@1", CHAIN) == made("1F0@1", CHAIN)
    assert needed("1SEND_B0>0@1", CHAIN) == made("1I0@1", CHAIN)
    assert needed("2RECV_F0<1", CHAIN) == needed("0RECV_B0<1", CHAIN) == set()


def test_with_replicas_the_update_waits_for_the_reduction() -> None:
    """An update needs its reduction, which needs all microbatches' gradients."""
    assert needed("0R@1", REPLICATED) == {
        "dw[stage 0, microbatch 0, step 1]",
        "dw[stage 0, microbatch 1, step 1]",
    }
    assert needed("0U@1", REPLICATED) == {
        "reduced dw[stage 0, step 1]",
        "weights[stage 0, after 1 updates]",
    }


def test_delays_choose_the_version_that_both_directions_read() -> None:
    """`max(0, t - delay)` updates, for F and its B; each update follows the last."""
    versions = [version_read(0, step, DELAYED) for step in range(4)]
    assert versions == [0, 0, 1, 2]
    assert [version_read(3, step, DELAYED) for step in range(4)] == [0, 1, 2, 3]
    for kind in "FBI":
        assert "weights[stage 0, after 2 updates]" in needed(f"0{kind}1@3", DELAYED)
        assert "weights[stage 2, after 3 updates]" in needed(f"2{kind}1@3", DELAYED)
    assert "weights[stage 0, after 3 updates]" in needed("0U@3", DELAYED)


def test_a_loss_over_the_batch_stands_between_forwards_and_backwards() -> None:
    """A whole-batch loss reads every output, and each backward there waits for it."""
    outputs = {"y[stage 1, microbatch 0, step 1]", "y[stage 1, microbatch 1, step 1]"}
    assert needed("1L@1", BATCH_LOSS) == outputs
    assert "dloss[stage 1, step 1]" in needed("1B0@1", BATCH_LOSS)
    assert "dloss[stage 1]" not in needed("0B0", BATCH_LOSS)


def test_a_frozen_teacher_feeds_the_student_forward_by_forward() -> None:
    """Without a whole-batch loss, the student's last forward reads what it gives out.

    The teacher's weights never move, so no op waits for a version of them.
    """
    assert needed("0F0@1", FROZEN_TEACHER) == set()
    assert needed("1F0@1", FROZEN_TEACHER) == {"y[stage 0, microbatch 0, step 1]"}
    assert needed("3F1", FROZEN_TEACHER) == {
        "y[stage 1, microbatch 1]",
        "y[stage 2, microbatch 1]",
        "weights[stage 3, after 0 updates]",
    }
    assert "dx[stage 3, microbatch 1]" in needed("2B1", FROZEN_TEACHER)


def with_microbatches(
    num_teacher: int, num_student: int, *whole_batch_flows: tuple[int, int]
) -> Program:
    """The frozen teacher and its student, with other microbatches."""
    nets = Net("teacher", num_teacher), Net("student", num_student)
    whole = frozenset(whole_batch_flows)
    return replace(FROZEN_TEACHER, nets=nets, whole_batch_flows=whole)


def test_a_loss_reads_the_finer_microbatches_of_a_teacher() -> None:
    """Each of the student's last forwards reads those that its samples are in.

    They are neighbours: a student's microbatch is cut into the teacher's.
    """
    finer = with_microbatches(6, 2)
    outputs = {f"y[stage 1, microbatch {i}]" for i in (3, 4, 5)}
    own = {"y[stage 2, microbatch 1]", "weights[stage 3, after 0 updates]"}
    assert needed("3F1", finer) == outputs | own
    assert needed("1F5", finer) == {"y[stage 0, microbatch 5]"}


def test_a_loss_reads_a_part_of_a_coarser_microbatch() -> None:
    """Several of the student's last forwards read the same output."""
    coarser = with_microbatches(2, 6)
    for microbatch in range(6):
        output = f"y[stage 1, microbatch {microbatch // 3}]"
        assert output in needed(f"3F{microbatch}", coarser)
        assert len(needed(f"3F{microbatch}", coarser)) == 3


def test_a_loss_per_microbatch_may_read_the_teachers_whole_batch() -> None:
    """Contrastive losses compare each sample with all keys, whatever the numbers."""
    program = with_microbatches(3, 2, (1, 3))
    for microbatch in range(2):
        outputs = {f"y[stage 1, microbatch {i}, step 1]" for i in range(3)}
        assert outputs < needed(f"3F{microbatch}@1", program)
        assert len(needed(f"3F{microbatch}@1", program)) == 5


def test_a_momentum_teacher_feeds_the_loss_and_follows_the_student() -> None:
    """The loss reads all of the teacher's microbatches, however many there are.

    Its update needs the student's weights of after this step, and its own of before.
    """
    program = MOMENTUM_TEACHER
    assert needed("3F0", program) == {
        "y[stage 2, microbatch 0]",
        "weights[stage 3, after 0 updates]",
    }
    assert needed("3L", program) == {
        *(f"y[stage 3, microbatch {i}]" for i in range(2)),
        *(f"y[stage 1, microbatch {i}]" for i in range(3)),
    }
    assert needed("1U@1", program) == {
        "weights[stage 1, after 1 updates]",
        "weights[stage 3, after 2 updates]",
    }
    assert "weights[stage 1, after 1 updates]" in needed("1F2@2", program)


def test_evaluation_needs_no_version() -> None:
    """Weights that do not move are given."""
    program = Program.chain([0, 1], 2, trainable=False)
    assert needed("1F0", program) == {"y[stage 0, microbatch 0]"}
    assert {str(op) for op in due_ops(program)} == {"0F0", "0F1", "1F0", "1F1"}


def test_only_the_first_weights_are_given() -> None:
    """All else is made by an op, which errors name."""
    first, *_ = needs(Op.parse("0F0"), CHAIN)
    later, *_ = needs(Op.parse("0F0@1"), CHAIN)
    assert is_given(first)
    assert not is_given(later)
    assert maker(later, CHAIN) == "0U on device 0"
    output, *_ = needs(Op.parse("2F1@1"), CHAIN)
    assert maker(output, CHAIN) == "1F1@1 on device 1"


@pytest.mark.parametrize(
    ("program", "kinds"),
    [
        (CHAIN, {"F": 18, "B": 18, "U": 9}),
        (REPLICATED, {"F": 18, "B": 18, "R": 9, "U": 9}),
        (BATCH_LOSS, {"F": 8, "B": 8, "L": 2, "U": 4}),
        (FROZEN_TEACHER, {"F": 16, "B": 8, "U": 4}),
        (MOMENTUM_TEACHER, {"F": 30, "B": 12, "L": 3, "U": 12}),
    ],
)
def test_due_are(program: Program, kinds: dict[str, int]) -> None:
    """Once per microbatch or once per step, and only where it means anything."""
    due = list(due_ops(program))
    assert len(set(due)) == len(due)
    assert Counter(op.kind.value for op in due) == kinds


@pytest.mark.parametrize("kind", Kind)
def test_no_kind_is_forgotten(kind: Kind) -> None:
    """Each makes something, or moves a message, or releases what it needs (RESHARD)."""
    assert bool(make_rules(kind, 0)) == (kind not in MESSAGES | {Kind.RESHARD})


@given(program=programs())
def test_whatever_is_needed_is_made_by_one_due_op(program: Program) -> None:
    """The rules are closed: no value comes from nowhere, and none from two places."""
    due = list(due_ops(program))
    made = Counter(value for op in due for value in makes(op, program))
    assert set(made.values()) <= {1}
    needed = {value for op in due for value in needs(op, program)}
    assert {value for value in needed if not is_given(value)} <= set(made)


@given(schedule=orders())
def test_every_program_can_be_done(schedule: Schedule) -> None:
    """No rule waits for itself: the strategy finds an order, whatever the program."""
    done = [op for lane in schedule.lanes for op in lane.ops]
    halves = sum(op.kind is Kind.BACKWARD_WEIGHT for op in done)
    assert len(done) == len(list(due_ops(schedule.program))) + halves
