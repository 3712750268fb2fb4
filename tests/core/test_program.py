"""Programs know who flows where, and refuse facts that contradict each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from hocket.core.program import Net, Program, Stage
from hocket.errors import PlanError
from tests.strategies import programs, teacher_student_programs

TEACHER_STUDENT = Program(
    (Net("teacher", 4), Net("student", 2, batch_loss=True)),
    (
        Stage("teacher", 0, trainable=False, delay=1, follows=(2,)),
        Stage("teacher", 1, trainable=False, delay=1, follows=(3,)),
        Stage("student", 0),
        Stage("student", 1),
    ),
    ((0, 1), (1, 3), (2, 3)),
)


def faulty(**changes: object) -> str:
    """What a chain of two stages with these changes is refused with."""
    program = Program.chain([0, 1], 2)
    with pytest.raises(PlanError) as caught:
        replace(program, **changes)  # type: ignore[arg-type]
    return str(caught.value)


def test_chain_is_one_net_in_a_row() -> None:
    """Stage after stage, each on the device it is given."""
    program = Program.chain([0, 1, 0, 1], 4, delays=[1, 1, 0, 0], num_steps=3)
    assert program.flows == ((0, 1), (1, 2), (2, 3))
    assert program.stages_on == ((0, 2), (1, 3))
    assert program.num_devices == 2
    assert program.num_stages == 4
    assert [stage.delay for stage in program.stages] == [1, 1, 0, 0]
    assert program.num_microbatches_of(3) == 4
    assert program.num_steps == 3


def test_knows_its_neighbours_across_nets() -> None:
    """Outputs go from the teacher to the student's loss; gradients never come back."""
    program = TEACHER_STUDENT
    assert program.sources == ((), (0,), (), (1, 2))
    assert program.targets == ((1,), (3,), (3,), ())
    assert program.gradient_targets == ((), (), (3,), ())
    assert program.loss_stages == {3}
    assert program.net_of(0).num_microbatches == 4


def test_a_skip_connection_is_a_flow_like_any_other() -> None:
    """A stage may be read by several, and read several."""
    chain = Program.chain([0, 1, 2], 2)
    program = replace(chain, flows=(*chain.flows, (0, 2)))
    assert program.targets[0] == (1, 2)
    assert program.sources[2] == (1, 0)
    assert program.gradient_targets[0] == (1, 2)


def test_frozen_front_stages_get_no_gradient() -> None:
    """A stage that is not trainable gets no gradients."""
    stages = (Stage("model", 0, trainable=False), Stage("model", 0), Stage("model", 1))
    program = Program((Net("model", 2),), stages, ((0, 1), (1, 2)))
    assert program.gradient_targets == ((), (2,), ())
    assert not program.stages[0].moves


def test_evaluation_computes_the_loss_of_the_batch_too() -> None:
    """The net's last stage has the loss, also if no stage is trainable."""
    program = Program.chain([0, 1], 2, trainable=False, batch_loss=True)
    assert program.loss_stages == {1}


@given(program=programs())
def test_flows_can_be_read_from_both_ends(program: Program) -> None:
    """Sources and targets are the same facts."""
    out = {(s, t) for s, ts in enumerate(program.targets) for t in ts}
    into = {(s, t) for t, ss in enumerate(program.sources) for s in ss}
    assert out == into == set(program.flows)


@given(program=teacher_student_programs())
def test_equal_facts_are_equal_programs(program: Program) -> None:
    """Rules are cached by program, so that equality and hash must agree."""
    twin = replace(program)
    assert twin == program
    assert hash(twin) == hash(program)
    assert replace(program, num_steps=program.num_steps + 1) != program


STAGES = [
    (Stage("model", -1), "stage 1 has a negative device or delay"),
    (Stage("model", 1, delay=-1), "stage 1 has a negative device or delay"),
    (Stage("model", 2), "no stage is on device 1, but one on device 2"),
    (Stage("model", 999_999_999), "no stage is on device 1, but one on device 999"),
    (Stage("model", 0, False, follows=(7,)), "follows stage 7, which does not exist"),
    (Stage("model", 0, True, follows=(0,)), "only a stage that is not trainable may"),
    (Stage("model", 1, False, follows=(0,)), "put both on one device"),
    (Stage("model", 1, trainable=False), "which would lose the gradient"),
]  # numbers out of range, teachers that cannot follow, gradients that get lost


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *(({"stages": (Stage("model", 0), stage)}, reason) for stage, reason in STAGES),
        ({"num_steps": 0}, "num_steps is 0, and must be at least 1"),
        ({"num_replicas": -1}, "num_replicas is -1"),
        ({"nets": (Net("model", 0),)}, "num_microbatches of model is 0"),
        ({"nets": ()}, "at least one net and one stage"),
        ({"stages": (), "flows": ()}, "at least one net and one stage"),
        ({"nets": (Net("model", 2), Net("model", 2))}, "two nets share a name"),
        ({"nets": (Net("a b", 2),)}, "named 'a b': use letters, digits and _.- alone"),
        ({"nets": (Net("other", 2),)}, "stage 0 is part of net 'model', which is not"),
        ({"flows": ((1, 0),)}, "flow 1 -> 0 must go from a lower to a higher"),
        ({"flows": ((0, 0),)}, "flow 0 -> 0 must go from a lower to a higher"),
        ({"flows": ((0, 2),)}, "both below 2"),
        ({"flows": ((0, 1), (0, 1))}, "flow 0 -> 1 is listed twice"),
        (
            {"whole_batch_flows": frozenset({(0, 2)})},
            "flow 0 -> 2 is to read the whole",
        ),
        (
            {"whole_batch_flows": frozenset({(0, 1)})},
            "begin at a stage that is not tra",
        ),
    ],
)
def test_refuses_what_cannot_be(changes: dict[str, object], reason: str) -> None:
    """One wrong fact, one sentence."""
    assert reason in faulty(**changes)


def test_refuses_numbers_that_do_not_fit_together() -> None:
    """One delay for each stage; a flow trained through joins equal microbatches."""
    stages = Stage("a", 0), Stage("b", 1)
    with pytest.raises(PlanError, match="4 microbatches to net b with 2"):
        Program((Net("a", 4), Net("b", 2)), stages, ((0, 1),))
    with pytest.raises(PlanError, match="1 delays do not fit 2 stages"):
        Program.chain([0, 1], 2, delays=[1])


def test_names_all_faults_at_once() -> None:
    """Who has made two mistakes need not find the second one alone."""
    text = faulty(num_steps=0, flows=((1, 0), (0, 5)))
    assert text.count("\n") == 3


def test_microbatches_may_differ_where_one_is_cut_into_the_others() -> None:
    """A forward cannot read what was cut in another way; a loss over all of it can."""
    assert TEACHER_STUDENT.num_microbatches_of(0) == 4
    for num_teacher, num_student, fits in ((4, 2, True), (2, 4, True), (3, 2, False)):
        nets = Net("teacher", num_teacher), Net("student", num_student)
        if fits:
            replace(TEACHER_STUDENT, nets=nets)
            continue
        with pytest.raises(PlanError, match=r"flow 1 -> 3 .* 3 microbatches .* with 2"):
            replace(TEACHER_STUDENT, nets=nets)
        whole = frozenset({(1, 3)})
        replace(TEACHER_STUDENT, nets=nets, whole_batch_flows=whole)
