"""Losses over all replicas: outputs are gathered (op G) before the loss reads them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hocket.core.check import check
from hocket.core.costs import Costs, Link, StageCost
from hocket.core.dataflow import due_ops, needs
from hocket.core.op import Kind, Op
from hocket.core.plans.lane_plan import plan_lanes
from hocket.core.program import Net, Program, Stage
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.errors import PlanError, ScheduleError
from hocket.passes.add_messages import add_messages
from tests.core.support.spans import spans

ONE_STAGE = Program.chain(
    [0], 2, num_replicas=2, batch_loss=True, loss_over_replicas=True
)
TEACHER = Program(
    (Net("teacher", 2), Net("student", 1, batch_loss=True, loss_over_replicas=True)),
    (Stage("teacher", 0, trainable=False), Stage("student", 1)),
    ((0, 1),),
    num_replicas=2,
)
TAUGHT = "d0 0F0 0F1 0G\nd1 1F0 1G 1L 1B0 1R 1U"


def due(program: Program) -> set[str]:
    """The gathers and losses of a program."""
    ops = (op for op in due_ops(program) if op.kind in (Kind.GATHER, Kind.LOSS))
    return set(map(str, ops))


def test_each_stage_that_the_loss_reads_is_gathered_once_per_step() -> None:
    """The student's last stage, and the teacher's whose output flows into the loss."""
    needed = {str(value) for value in needs(Op(Kind.LOSS, 1), TEACHER)}

    assert due(TEACHER) == {"0G", "1G", "1L"}
    assert needed == {"gathered y[stage 0]", "gathered y[stage 1]"}
    assert [str(value) for value in needs(Op(Kind.GATHER, 0), TEACHER)] == [
        "y[stage 0, microbatch 0]",
        "y[stage 0, microbatch 1]",
    ]


def test_with_one_replica_nothing_is_gathered() -> None:
    """One replica has no others to gather from."""
    assert due(replace(TEACHER, num_replicas=1)) == {"1L"}


def test_a_loss_of_single_microbatches_is_over_no_replicas() -> None:
    """The error names the net, and how to set a whole-batch loss."""
    with pytest.raises(PlanError, match="net model has a loss over replicas, but none"):
        Program.chain([0], 1, loss_over_replicas=True)


def test_the_text_form_holds_it() -> None:
    """The text form writes G in lanes, and `loss=replicas` if it has a header."""
    schedule = Schedule(TEACHER, Schedule.parse(TAUGHT).lanes)
    plain = Schedule.parse("d0  0F0 0F1 0G 0L 0B0 0B1 0R 0U")

    assert "net student microbatches=1 loss=replicas" in str(schedule)
    assert Schedule.parse(str(schedule)) == schedule
    assert plain.program == ONE_STAGE
    assert str(plain) == "d0  0F0 0F1 0G 0L 0B0 0B1 0R 0U"


def test_the_check_wants_it_before_the_loss() -> None:
    """A forgotten or a late gather never passes."""
    check(Schedule(TEACHER, Schedule.parse(TAUGHT).lanes))
    for text in ("d0 0F0 0F1 0L 0G 0B0 0B1 0R 0U", "d0 0F0 0F1 0L 0B0 0B1 0R 0U"):
        with pytest.raises(ScheduleError):
            check(Schedule(ONE_STAGE, Schedule.parse(text).lanes))


def test_what_a_gather_takes_by_hand() -> None:
    """A ring of two: each sends its 2 outputs of 3 bytes once, 6 s at 1 byte/s.

    The loss waits for it: 2 forwards, 6 s, the loss, 2 backwards of 2 s.
    """
    stage = StageCost(
        forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, loss_s=1.0, output_bytes=3
    )
    costs = Costs((stage,), reduce_link=Link(bytes_per_s=1.0))
    schedule = Schedule.parse("d0 0F0 0F1 0G 0L 0B0 0B1 0R 0U")
    timeline = simulate(schedule, costs)
    times = spans(timeline)

    assert times["0G"] == (2.0, 8.0)
    assert times["0L"] == (8.0, 9.0)
    assert times["0U"][0] == 13.0
    assert timeline.traffic.num_bytes.tolist()[0] == 6
    assert timeline.peak_bytes(0) == 12.0  # two outputs of both replicas


def test_gathered_outputs_go_to_the_loss_in_one_message() -> None:
    """From the teacher's device to the student's, once per step: 2 * 2 * 3 bytes."""
    schedule = Schedule(TEACHER, Schedule.parse(TAUGHT).lanes)
    plans = {str(plan.op): plan for lane in plan_lanes(schedule) for plan in lane}
    stage = StageCost(forward_s=1.0, output_bytes=3)
    traffic = simulate(schedule, Costs((stage, stage))).traffic

    assert [m.flows for m in plans["0G"].sends] == [((0, 1),)]
    assert plans["0G"].sends == plans["1L"].receives
    assert [value.stage for value in plans["1L"].waits] == [1]
    sent = traffic.num_bytes[traffic.from_device != traffic.to_device]
    assert sent.tolist() == [12]


def test_messages_as_ops_carry_one_microbatch() -> None:
    """Gathered outputs are of all: it says what to do."""
    with pytest.raises(PlanError, match="leave messages implicit"):
        add_messages(Schedule(TEACHER, Schedule.parse(TAUGHT).lanes))
