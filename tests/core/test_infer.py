"""The simplest program that lanes can be an order of."""

from __future__ import annotations

import re

import pytest
from hypothesis import given

from hocket.core.formats.infer import infer_program
from hocket.core.op import Op
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.errors import ParseError, PlanError
from tests.strategies import chains, orders


def lane(device: int, text: str) -> tuple[int, tuple[Op, ...]]:
    """The ops in the text, on a device."""
    return device, tuple(Op.parse(word) for word in text.split())


@given(schedule=orders(chains()))
def test_finds_every_plain_chain(schedule: Schedule) -> None:
    """A program without delays and with at most two replicas follows from its lanes."""
    program = schedule.program
    found = infer_program([(x.device, x.ops) for x in schedule.lanes])
    plain = Program.chain(
        [stage.device for stage in program.stages],
        program.num_microbatches_of(0),
        num_steps=program.num_steps,
        num_replicas=program.num_pipelines,
        batch_loss=program.nets[0].batch_loss,
        loss_over_replicas=bool(program.gathered_stages),
    )
    assert found == plain


def test_forwards_alone_are_an_evaluation() -> None:
    """Nothing is trainable, also where the loss of the batch is computed."""
    assert not infer_program([lane(0, "0F0 0F1")]).stages[0].trainable
    program = infer_program([lane(0, "0F0 0F1 0L")])
    assert program == Program.chain([0], 2, trainable=False, batch_loss=True)


def test_a_missing_backward_does_not_make_a_stage_frozen() -> None:
    """Else a forgotten gradient would pass for a stage that is not trained."""
    program = infer_program([lane(0, "0F0"), lane(1, "1F0 1B0 1U")])
    assert all(stage.trainable for stage in program.stages)


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ("0F0 0B0", "1F0 0F1", "stage 0 runs on device 0 and, as 0F1, on device 1"),
        ("0F0", "2F0", "no op of stage 1, but one of stage 2"),
        ("0F0 0F2", "1F0", "no op of microbatch 1, but one of microbatch 2"),
        ("0F0 0F0@2", "1F0", "no op of step 1, but one of step 2"),
        ("999999999F0", "1F0", "no op of stage 0, but one of stage 999999999"),
        ("0F999999999", "1F0", "no op of microbatch 1, but one of microbatch 99999"),
    ],
)
def test_refuses_what_no_chain_does(first: str, second: str, reason: str) -> None:
    """At once, and however large the numbers are."""
    with pytest.raises(ParseError) as caught:
        infer_program([lane(0, first), lane(1, second)], path="order.txt")
    assert reason in str(caught.value)
    assert re.match(r"order.txt, line [12]: ", str(caught.value))


def test_refuses_devices_with_gaps() -> None:
    """A gap in the numbers would be a device that does nothing."""
    with pytest.raises(PlanError, match="no stage is on device 0"):
        infer_program([lane(7, "0F0")])
