"""What each kind of op reads and changes in place."""

from __future__ import annotations

import pytest
from hypothesis import given

from hocket.core.accesses import Resource, accesses
from hocket.core.dataflow import Fact, Value, makes, needs, version_read
from hocket.core.op import Kind, Op
from hocket.core.program import Net, Program, Stage
from hocket.core.schedule import Schedule
from tests.strategies import orders

DELAYED = Program.chain([0], 2, num_steps=4, num_replicas=2, delays=[1])
TEACHER = Program(
    (Net("teacher", 1), Net("student", 1, batch_loss=True)),
    (Stage("teacher", 0, trainable=False, delay=1, follows=(1,)), Stage("student", 0)),
    ((0, 1),),
    num_steps=3,
)


def used(text: str, program: Program) -> set[str]:
    """What an op uses, with a sign at what it changes."""
    found = accesses(Op.parse(text), program)
    return {f"{access}{'!' if access.writes else ''}" for access in found}


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("0F1@3", {"weights[stage 0, after 2 updates]", "buffers[stage 0]!"}),
        ("0I1@3", {"weights[stage 0, after 2 updates]"}),
        ("0W1@3", {"gradients[stage 0, step 3]!"}),
        ("0R@3", {"gradients[stage 0, step 3]!"}),
        (
            "0B1@3",
            {"weights[stage 0, after 2 updates]", "gradients[stage 0, step 3]!"},
        ),
        (
            "0U@3",
            {"gradients[stage 0, step 3]", "weights[stage 0, after 4 updates]!"},
        ),
    ],
)
def test_a_trained_stage(op: str, expected: set[str]) -> None:
    """Forward and backward read the old version that the delay promises."""
    assert used(op, DELAYED) == expected


def test_a_moving_teacher_changes_its_buffers_and_reads_what_it_follows() -> None:
    """It runs in training mode; its update reads the student's new weights."""
    assert used("0F0@2", TEACHER) == {
        "weights[stage 0, after 1 updates]",
        "buffers[stage 0]!",
    }
    assert used("0U@1", TEACHER) == {
        "weights[stage 1, after 2 updates]",
        "weights[stage 0, after 2 updates]!",
    }


def test_a_whole_batch_loss_changes_nothing_in_place() -> None:
    """Its gradient is a value of its own."""
    assert used("1L", TEACHER) == set()


@given(orders())
def test_agrees_with_dataflow(schedule: Schedule) -> None:
    """Weights are read in the version promised; who makes a value writes it."""
    program = schedule.program
    for op in (op for lane in schedule.lanes for op in lane.ops):
        found = accesses(op, program)
        read = {
            Value(Fact.WEIGHTS, access.stage, None, access.number)
            for access in found
            if access.resource is Resource.WEIGHTS and not access.writes
        }
        assert read <= set(needs(op, program))
        if op.kind is Kind.FORWARD and read:
            assert {v.step for v in read} == {version_read(op.stage, op.step, program)}
        facts = {value.fact for value in makes(op, program)}
        written = {access.resource for access in found if access.writes}
        makes_gradients = bool(facts & {Fact.WEIGHT_GRAD, Fact.REDUCED_GRAD})
        assert (Resource.GRADIENTS in written) == makes_gradients
        assert (Resource.WEIGHTS in written) == (Fact.WEIGHTS in facts)
