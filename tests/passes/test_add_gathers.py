"""Gathers are placed where `check` wants them, one op ahead of the first reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hocket.core.check import check
from hocket.core.dataflow import due_ops
from hocket.core.gates import gates_of
from hocket.core.op import READS_WEIGHTS, SHARDING, Kind, Op
from hocket.core.plans.lane_plan import plan_portions
from hocket.core.program import Net, Program, Stage
from hocket.core.schedule import Lane, Schedule
from hocket.core.step_end import repeat_ahead
from hocket.errors import PlanError
from hocket.passes.add_gathers import KEEPS, Keep, Keeps, add_gathers, drop_gathers
from hocket.passes.fill_with import fill_with
from hocket.schedules import SCHEDULES, make_schedule
from tests.core.support.gathered import is_gathered_right
from tests.passes.support.teachers import FROZEN, equal_costs, with_teacher
from tests.strategies import orders, programs

TAUGHT = Program(
    (Net("teacher", 2), Net("student", 2)),
    (Stage("teacher", 0, trainable=False), Stage("student", 0)),
    ((0, 1),),
    num_steps=4,
    num_shards=2,
)
many = settings(suppress_health_check=[HealthCheck.too_slow])
keeps_of_all = pytest.mark.parametrize("keeps", KEEPS)


def lane_of(schedule: Schedule, device: int = 0) -> str:
    """The ops of a device as text."""
    return " ".join(map(str, schedule.lanes[device].ops))


def sharded(lane: str, num_stages: int = 1, num_steps: int = 1) -> Schedule:
    """A chain of stages on one device of two microbatches."""
    program = Program.chain([0] * num_stages, 2, num_steps=num_steps, num_shards=2)
    return Schedule(program, (Lane(0, 0, tuple(map(Op.parse, lane.split()))),))


TWO_STAGES = "0F0 0F1 1F0 1F1 1B0 1B1 1R 0B0 0B1 0R 0U 1U"


@pytest.mark.parametrize(
    ("keeps", "expected"),
    [
        (
            "step",
            "0UNSHARD0 0F0 1UNSHARD0 0F1 1F0 1F1 1B0 1B1 1RESHARD0 1R 0B0 0B1 "
            "0RESHARD0 0R 0U 1U",
        ),
        (
            "run",
            "0UNSHARD0 0F0 1UNSHARD0 0F1 0RESHARD0 1F0 1F1 1B0 0UNSHARD1 1B1 1RESHARD0 "
            "1R 0B0 0B1 0RESHARD1 0R 0U 1U",
        ),
        (
            {0: "op", 1: "run"},
            "0UNSHARD0 0F0 0RESHARD0 0UNSHARD1 1UNSHARD0 0F1 0RESHARD1 1F0 1F1 1B0 "
            "0UNSHARD2 1B1 1RESHARD0 1R 0B0 0RESHARD2 0UNSHARD3 0B1 0RESHARD3 0R 0U 1U",
        ),
    ],
)
def test_places(keeps: Keeps, expected: str) -> None:
    """One op ahead, and behind the stage's release; released behind the last reader."""
    schedule = add_gathers(sharded(TWO_STAGES, 2), keeps)

    assert lane_of(schedule) == expected
    check(schedule)


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_without_delays_and_copies(name: str, num_shards: int) -> None:
    """The gathers are right, and all else stays in its order."""
    num_devices = 1 if SCHEDULES[name].is_data_parallel else 4

    def made(num_replicas: int, num_shards: int) -> Schedule:
        return make_schedule(
            name,
            num_devices=num_devices,
            num_microbatches=1 if name == "pipedream" else 8,
            num_steps=3,
            num_replicas=num_replicas,
            num_shards=num_shards,
        )

    bare = made(2, 1)
    stages = bare.program.stages
    if bare.program.copies or any(stage.delay for stage in stages):
        with pytest.raises(PlanError):
            made(1, 2)
        return
    schedule = made(3 - num_shards, num_shards)
    if num_shards == 1:
        assert all(add_gathers(schedule, keeps) is schedule for keeps in KEEPS)
        return
    assert schedule == add_gathers(schedule, "step")
    for keeps in KEEPS:
        gathered = add_gathers(schedule, keeps)
        check(gathered)
        assert drop_gathers(gathered).lanes == bare.lanes
        assert add_gathers(gathered, keeps) == gathered
        assert Schedule.parse(str(gathered)) == gathered


def no_delays(program: Program) -> Program:
    """The same program of one step, sharded, reading the newest weights."""
    stages = tuple(replace(stage, delay=0) for stage in program.stages)
    return replace(program, stages=stages, num_steps=1, num_shards=2)


@many
@given(
    order=orders(programs().map(no_delays)),
    keeps=st.sampled_from(KEEPS),
    num_steps=st.integers(1, 2),
)
def test_any_order_of_any_program(order: Schedule, keeps: Keep, num_steps: int) -> None:
    """Teachers, followers, skips, losses of whole batches: what is read is whole."""
    schedule = add_gathers(order.with_num_steps(num_steps), keeps)

    assert is_gathered_right(schedule)
    check(schedule)
    for lane in schedule.lanes:
        num_gathers = sum(op.kind is Kind.UNSHARD for op in lane.ops)
        num_readers = sum(op.kind in READS_WEIGHTS for op in lane.ops)
        stages = {op.stage for op in lane.ops}
        if keeps == "step":
            assert num_gathers == num_steps * len(stages)
        elif keeps == "op":
            assert num_gathers == num_readers
        else:
            assert num_gathers == num_runs(lane.ops)


def num_runs(ops: Sequence[Op]) -> int:
    """How often the computing stage or step of a lane changes to one that reads."""
    kinds = READS_WEIGHTS
    runs: list[list[Op]] = []
    for op in ops:
        if op.kind not in kinds:
            continue
        if not runs or (runs[-1][-1].stage, runs[-1][-1].step) != (op.stage, op.step):
            runs.append([])
        runs[-1].append(op)
    return sum(any(op.kind in READS_WEIGHTS for op in run) for run in runs)


@keeps_of_all
def test_a_teacher_that_is_ahead(keeps: Keep) -> None:
    """The body repeats its gathers; the teacher's are of the next step."""
    once = "1F0 1F1 0F0@1 1B1 0F1@1 1B0 1R 1U"
    lane = Lane(0, 0, tuple(map(Op.parse, once.split())))
    schedule = add_gathers(repeat_ahead(TAUGHT, [lane]), keeps)

    check(schedule)
    check(schedule.with_num_steps(9))
    assert schedule.num_repeats == 3
    assert add_gathers(schedule.with_num_steps(9), keeps) == schedule.with_num_steps(9)
    assert {*due_ops(TAUGHT)} <= set(schedule.lanes[0].ops)


@pytest.mark.parametrize("delay", [FROZEN, 0])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b", "zb-v"])
def test_a_teacher_that_fills_waits(name: str, delay: int | None) -> None:
    """Its forwards need gathers of their own; no portion ends within one."""
    base = make_schedule(name, num_devices=2, num_microbatches=4, num_shards=2)
    program = with_teacher(base.program, 4, delay=delay, num_steps=4)
    filled = fill_with(base, program, costs=equal_costs(program, 1.0))
    assert filled == add_gathers(filled)
    for keeps in KEEPS:
        schedule = add_gathers(filled, keeps)
        check(schedule)
        if schedule.body:
            plan_portions(schedule, gates_of(schedule, clips=True))


def test_a_frozen_net_is_released_when_each_step_ends() -> None:
    """Evaluation has neither updates nor backwards."""
    schedule = make_schedule(
        "forward-only", num_devices=1, num_microbatches=2, num_steps=2, num_shards=2
    )

    assert lane_of(schedule) == (
        "0UNSHARD0 0F0 0F1 0RESHARD0 0UNSHARD0@1 0F0@1 0F1@1 0RESHARD0@1"
    )


def test_no_gather_begins_before_its_step() -> None:
    """Stage 0 could be gathered beside 0B1 for the next step only with old weights."""
    once = sharded("0F0 0F1 0B0 0B1 0R 0U")
    lane = lane_of(add_gathers(once.with_num_steps(2)))

    assert "0RESHARD0 0R 0U 0UNSHARD0@1 0F0@1" in lane


@pytest.mark.parametrize(
    ("schedule", "keeps", "says"),
    [
        (
            sharded("0F0 0F1 0B0 0B1 0R 0U"),
            "always",
            "keeps is 'always' for stage 0: choose one of step, run, op",
        ),
        (
            sharded(TWO_STAGES, 2),
            {1: "op"},
            r"keeps names stages \[1\], but the program has stages 0 to 1, of which "
            "stage 0 is left out: name each of them",
        ),
        (
            sharded(TWO_STAGES, 2),
            {0: "op", 1: "op", 2: "op"},
            "of which 2 is none",
        ),
        (
            Schedule(
                Program.chain([0], 1, delays=[1], num_shards=2), (Lane(0, 0, ()),)
            ),
            "step",
            "the program has num_shards=2, but stage 0 has delay 1, and older versions "
            "of shards are not built: choose an order without delays, such as 1f1b, or "
            "use num_replicas in place of num_shards",
        ),
    ],
)
def test_refuses(schedule: Schedule, keeps: Keeps, says: str) -> None:
    """What cannot be sharded is named, with the way out."""
    with pytest.raises(PlanError, match=says):
        add_gathers(schedule, keeps)


def test_refuses_orders_that_are_not_built() -> None:
    """Copies, several lanes, and steps that overlap without a body."""
    chain = Program.chain([0], 1, num_shards=2)
    lanes = Schedule(chain, (Lane(0, 0, ()), Lane(0, 1, ())))
    with pytest.raises(PlanError, match="device 0 has 2 lanes, and gathers for sev"):
        add_gathers(lanes)
    overlapping = sharded("0F0 0F0@1 0F1", num_steps=2)
    with pytest.raises(PlanError, match="0F1 on device 0 stands behind 0F0@1, in an"):
        add_gathers(overlapping)
    chimera = make_schedule("chimera", num_devices=2, num_microbatches=2)
    copies = replace(chimera, program=replace(chimera.program, num_shards=2))
    with pytest.raises(PlanError, match="are copies of one another, and shards of"):
        add_gathers(copies)


def test_dropped_gathers_leave_the_order_as_it_was() -> None:
    """An order without any is returned itself."""
    schedule = sharded(TWO_STAGES, 2)

    assert drop_gathers(schedule) is schedule
    assert drop_gathers(add_gathers(schedule)) == schedule
    assert not drop_gathers(add_gathers(schedule)).kinds & SHARDING
