"""Reductions come early, updates last, and teachers after their students."""

from __future__ import annotations

from hypothesis import given

from hocket.core.check import check
from hocket.core.op import Op
from hocket.core.program import Net, Program, Stage
from hocket.core.schedule import Schedule
from hocket.core.step_end import close_step, repeat_step
from tests.strategies import chains


def ops(text: str) -> list[Op]:
    """The ops of the text."""
    return [Op.parse(word) for word in text.split()]


def closed(program: Program, text: str) -> str:
    """The ops of device 0 once they are closed."""
    return " ".join(str(op) for op in close_step(program, 0, ops(text)).ops)


def test_updates_come_in_the_order_in_which_gradients_are_complete() -> None:
    """Behind all of the device's work."""
    program = Program.chain([0, 0], 2)
    order = "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"
    assert closed(program, order) == f"{order} 1U 0U"


def test_reductions_overlap_with_what_is_left_to_compute() -> None:
    """Each one stands right behind the last weight gradient of its stage."""
    program = Program.chain([0, 0], 1, num_replicas=2)
    order = "0F0 1F0 1I0 0I0 1W0 0W0"
    assert closed(program, order) == "0F0 1F0 1I0 0I0 1W0 1R 0W0 0R 1U 0U"


def test_a_teacher_is_updated_after_its_student() -> None:
    """A follower is updated after the student, whose new weights it reads."""
    program = Program(
        (Net("teacher", 1), Net("student", 1)),
        (Stage("teacher", 0, trainable=False, follows=(1,)), Stage("student", 0)),
        ((0, 1),),
    )
    assert closed(program, "0F0 1F0 1B0") == "0F0 1F0 1B0 1U 0U"
    lane = close_step(program, 0, ops("0F0 1F0 1B0"))
    check(Schedule(program, (lane,)))


def test_later_steps_keep_their_number() -> None:
    """Added ops have the step that they close."""
    program = Program.chain([0], 1, num_steps=3, num_replicas=2)
    assert closed(program, "0F0@2 0B0@2") == "0F0@2 0B0@2 0R@2 0U@2"


@given(program=chains())
def test_repeating_makes_every_step(program: Program) -> None:
    """Depth first on each device is an order of any chain with plain losses."""
    plain = Program.chain(
        [stage.device for stage in program.stages],
        program.num_microbatches_of(0),
        num_steps=program.num_steps,
        num_replicas=program.num_pipelines,
    )

    def order(device: int) -> list[Op]:
        stages = plain.stages_on[device]
        microbatches = range(plain.num_microbatches_of(0))
        forwards = [f"{s}F{i}" for i in microbatches for s in stages]
        backwards = [f"{s}B{i}" for i in microbatches for s in reversed(stages)]
        return ops(" ".join(forwards + backwards))

    check(repeat_step(plain, order))
