"""A teacher's forwards in the waits of any student's order."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hocket.core.check import check
from hocket.core.costs import Costs, StageCost
from hocket.core.gates import early_updates, flushes, gates_of
from hocket.core.op import Kind, Op
from hocket.core.program import Net, Program, Stage
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.errors import PlanError, ScheduleError
from hocket.passes.add_messages import add_messages
from hocket.passes.fill_with import fill_with
from hocket.schedules import SCHEDULES, Shape
from tests.passes.support.filled_case import Case
from tests.passes.support.teachers import FROZEN, equal_costs, with_teacher
from tests.strategies import accepted, largest, shares


def _is_base(name: str) -> bool:
    """Whether a schedule trains one step at a time."""
    program = SCHEDULES[name].make(largest(name)).program
    return all(stage.trainable and not stage.delay for stage in program.stages)


BASES: Final = sorted(name for name in SCHEDULES if _is_base(name))
every_base = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xdist_group(f"orders of {name}"))
        for name in BASES
    ],
)
few = settings(max_examples=5, suppress_health_check=list(HealthCheck), deadline=None)


@cache
def small(name: str) -> tuple[Shape, ...]:
    """The shapes of a schedule whose orders are quickly filled."""
    return tuple(
        shape
        for shape in accepted(name)
        if shape.num_microbatches <= 6 and shape.num_devices <= 4
    )


@st.composite
def cases(draw: st.DrawFn, name: str) -> Case:
    """A small shape of a schedule, with a teacher that is cut as the student is."""
    base = SCHEDULES[name].make(draw(st.sampled_from(small(name))))
    num = base.program.nets[0].num_microbatches
    program = with_teacher(
        base.program,
        num * draw(st.sampled_from([1, 2])),
        delay=draw(st.sampled_from([FROZEN, 0, 1, 2])),
        whole_batch=draw(st.booleans()),
    )
    teacher_s = float(draw(st.integers(1, 6)))
    return Case(base, program, equal_costs(program, teacher_s, draw(shares())))


@every_base
@few
@given(data=st.data(), num_steps=st.integers(1, 4))
def test_every_filled_order_is_accepted_with_one_version(
    name: str, data: st.DataObject, num_steps: int
) -> None:
    """All ops are there once, and no weights are kept beside those in use.

    A teacher of delay `d` is `d` batches ahead, which is why one version is enough. All
    of the student's updates wait for all of its gradients, as in the order that was
    filled; which is never touched, on each lane, step after step: so are its numerics,
    and its activations.
    """
    case = data.draw(cases(name))
    filled = case.filled(num_steps)
    assert set(check(filled).num_versions) == {1}
    assert flushes(filled)
    one_gate = gates_of(filled, clips=False)
    assert len(one_gate) == 1
    assert not early_updates(filled, one_gate)
    assert Schedule.parse(str(filled)) == filled
    if filled.body:
        check(add_messages(filled))

    alone = case.base.with_num_steps(num_steps)
    for lane, expected in zip(filled.lanes, alone.lanes, strict=True):
        kept = [op for op in lane.ops if op.stage >= case.first]
        assert [replace(op, stage=op.stage - case.first) for op in kept] == [
            *expected.ops
        ]
    if len(alone.lanes) == alone.program.num_devices:
        timelines = simulate(filled, case.costs), simulate(alone, case.student_costs())
        for device in range(alone.program.num_devices):
            peaks = [timeline.peak_activations(device) for timeline in timelines]
            assert peaks[0] == pytest.approx(peaks[1])


@every_base
@few
@given(data=st.data())
def test_a_step_is_never_longer_than_both_nets_alone(
    name: str, data: st.DataObject
) -> None:
    """Nor shorter than the work of a device, or than a step of the student alone."""
    case = data.draw(cases(name))
    if len(case.base.lanes) != case.base.program.num_devices:
        return  # several lanes share a device: work and bubble do not add up
    student = [
        simulate(case.base.with_num_steps(n), case.student_costs()).makespan_s
        for n in (1, 8, 12)
    ]
    step_s = case.step_s()
    assert step_s <= student[0] + teacher_s(case) + 1e-6
    assert step_s >= max(case.work_s(), (student[2] - student[1]) / 4) - 1e-6


def teacher_s(case: Case) -> float:
    """What the teacher alone takes for a batch, each device's stages as one."""
    teacher, costs = case.program.nets[0], case.costs.stages
    device = case.program.stages_on[0]
    share_s = sum(costs[n].forward_s for n in device if n < case.first)
    num_rounds = max(len(own) for own in case.program.stages_on)
    num_filling = num_rounds * (case.program.num_devices - 1)
    return (teacher.num_microbatches + num_filling) * share_s


@every_base
@few
@given(data=st.data())
def test_continues_for_more_steps(name: str, data: st.DataObject) -> None:
    """The body repeats: a filled order for some steps is the beginning of more."""
    case = data.draw(cases(name))
    more = case.filled(7)
    for num_steps in range(1, 5):
        filled = case.filled(num_steps)
        if filled.body:
            assert filled.with_num_steps(7) == more


def gpipe(num_devices: int, num_microbatches: int) -> Schedule:
    """GPipe's order, of one step."""
    return SCHEDULES["gpipe"].make(Shape(num_devices, num_microbatches))


@pytest.mark.parametrize("delay", [0, 1, 2, 3])
def test_forwards_find_the_weights_that_the_delay_promises(delay: int) -> None:
    """Read with one version in place: batch `k` sees `max(0, k - delay)` updates.

    The order of ops on each device decides it, without any rule of dataflow.
    """
    base = gpipe(3, 4)
    program = with_teacher(base.program, 4, delay=delay, num_steps=6)
    filled = fill_with(base, program, costs=equal_costs(program, 1.0))
    for lane in filled.lanes:
        num_updates = 0
        for op in lane.ops:
            if program.stages[op.stage].trainable:
                continue
            if op.kind is Kind.UPDATE:
                num_updates += 1
            else:
                assert num_updates == max(0, op.step - delay)


def test_a_frozen_teacher_runs_one_batch_ahead() -> None:
    """Its outputs for a step are there when the step before has ended."""
    base = gpipe(2, 2)
    program = with_teacher(base.program, 2, num_steps=3)
    filled = fill_with(base, program, costs=equal_costs(program, 1.0))
    for lane in filled.lanes:
        for place, op in enumerate(lane.ops):
            if op.stage < 2 and op.step:
                update = Op(Kind.UPDATE, lane.device + 2, None, op.step - 1)
                assert place < lane.ops.index(update)


@pytest.mark.parametrize(
    ("delay", "ahead", "num_versions"),
    [(FROZEN, 0, 1), (FROZEN, 2, 1), (1, 0, 2), (3, 1, 3), (2, 2, 1)],
)
def test_looks_as_far_ahead_as_is_said(
    delay: int | None, ahead: int, num_versions: int
) -> None:
    """A teacher that moves keeps a version more for each batch it is less ahead."""
    base = gpipe(2, 2)
    program = with_teacher(base.program, 2, delay=delay, num_steps=6)
    costs = equal_costs(program, 1.0)
    filled = fill_with(base, program, costs=costs, look_ahead={"teacher": ahead})

    assert check(filled).num_versions[:2] == (num_versions,) * 2
    for lane in filled.lanes:
        step = 0  # of the student
        for op in lane.ops:
            if program.stages[op.stage].trainable:
                step = op.step
            elif op.kind is Kind.FORWARD and ahead <= op.step < 6 - ahead:
                assert op.step - step in (ahead, ahead + 1)  # behind its update


@every_base
@few
@given(data=st.data(), num_steps=st.integers(1, 4))
def test_a_second_lane_takes_all_forwards_of_the_teacher(
    name: str, data: st.DataObject, num_steps: int
) -> None:
    """The first one keeps the student's order, and the checker accepts both.

    A teacher of delay `d` has up to `d` versions of its weights more: no event orders
    its forwards ahead and its updates until the student reads their outputs.
    """
    case = data.draw(cases(name))
    program = replace(case.program, num_steps=num_steps)
    filled = fill_with(case.base, program, costs=case.costs, own_lane=True)
    proof = check(filled)
    for number, stage in enumerate(program.stages):
        most = 1 + (stage.delay if stage.follows else 0)
        assert proof.num_versions[number] <= most
    last = max(lane.stream for lane in filled.lanes)
    first = [lane for lane in filled.lanes if lane.stream < last]
    second = [lane for lane in filled.lanes if lane.stream == last]
    for lane, expected in zip(
        first, case.base.with_num_steps(num_steps).lanes, strict=True
    ):
        kept = [op for op in lane.ops if op.stage >= case.first]
        assert [replace(op, stage=op.stage - case.first) for op in kept] == [
            *expected.ops
        ]
        added = [op for op in lane.ops if op.stage < case.first]
        assert all(op.kind is Kind.UPDATE for op in added)
    assert {lane.device for lane in second} == {*range(program.num_devices)}
    for lane in second:
        assert all(op.kind is not Kind.UPDATE for op in lane.ops)


def test_a_device_alone_has_a_lane_for_each_net() -> None:
    """As text: what `hocket simulate` and `hocket check` read."""
    base = gpipe(1, 2)
    program = with_teacher(base.program, 4, num_steps=2)
    costs = equal_costs(program, 1.0)
    filled = fill_with(base, program, costs=costs, own_lane=True)
    assert str(filled).splitlines()[-2:] == [
        "d0    |: 1F0 1F1 1B0 1B1 1U :| 1F0@1 1F1@1 1B0@1 1B1@1 1U@1",
        "d0.1  0F0 0F1 0F2 0F3 |: 0F0@1 0F1@1 0F2@1 0F3@1 :|",
    ]
    one_lane = fill_with(base, program, costs=costs).with_num_steps(9)
    for capacity, gain in ((1.0, 1.0), (2.0, 9 * (4 + 6) / (3 + 9 * 6))):
        known = replace(costs, lane_capacity=capacity)
        step_s = [
            simulate(order, known).makespan_s
            for order in (one_lane, filled.with_num_steps(9))
        ]
        assert step_s[0] / step_s[1] == pytest.approx(gain)


def test_refuses_to_look_where_no_weights_are() -> None:
    """Batch 2 would read the weights after an update that step 0 has not made."""
    base = gpipe(2, 2)
    program = with_teacher(base.program, 2, delay=1, num_steps=6)
    costs = equal_costs(program, 1.0)
    for wrong, words in (
        ({"teacher": 2}, "is 2, and its delay is 1"),
        ({"teacher": -1}, "it may be 0 or more"),
        ({"techer": 1}, "look_ahead names net .techer."),
    ):
        with pytest.raises(PlanError, match=words):
            fill_with(base, program, costs=costs, look_ahead=wrong)


def test_a_body_with_an_update_too_early_needs_a_second_version() -> None:
    """The checker sees what the place of an update means for memory."""
    base = gpipe(2, 2)
    program = with_teacher(base.program, 2, delay=1, num_steps=4)
    filled = fill_with(base, program, costs=equal_costs(program, 1.0))
    lanes = []
    for lane in filled.lanes:
        ops = [*lane.ops]
        update = Op(Kind.UPDATE, lane.device, None, 1)
        ahead = Op(Kind.FORWARD, lane.device, 1, 2)
        ops.insert(ops.index(update), ops.pop(ops.index(ahead)))  # the last before it
        ops[ops.index(update)], ops[ops.index(ahead)] = ahead, update
        lanes.append(replace(lane, ops=tuple(ops)))
    proof = check(Schedule(program, tuple(lanes)))
    assert proof.num_versions == (2, 2, 1, 1)


@pytest.mark.parametrize("text", ["0F1@1", "1F0@2", "0U@1", "2B0@1"])
def test_an_order_without_one_op_is_refused(text: str) -> None:
    """Whichever net it is of."""
    base = gpipe(2, 2)
    program = with_teacher(base.program, 2, delay=1, num_steps=3)
    filled = fill_with(base, program, costs=equal_costs(program, 1.0))
    lanes = tuple(
        replace(lane, ops=tuple(op for op in lane.ops if str(op) != text))
        for lane in filled.lanes
    )
    with pytest.raises(ScheduleError, match="missing"):
        check(replace(filled, lanes=lanes, body=(), num_repeats=0))


@pytest.mark.parametrize("devices", [(0, 1, 2), (2,), (0, 2), (3, 0, 1, 2), (1, 3, 2)])
def test_a_frozen_teacher_may_be_cut_elsewhere(devices: tuple[int, ...]) -> None:
    """Also over other devices than the student's; each works as it can."""
    base = gpipe(3, 3)
    program = with_teacher(base.program, 6, devices=devices, num_steps=4)
    costs = equal_costs(program, 0.5)
    filled = fill_with(base, program, costs=costs)
    check(filled)
    check(add_messages(filled))
    assert {lane.device for lane in filled.lanes} == {*range(program.num_devices)}
    busiest_s = max(3 * (3.0 + 1.0 * (device in devices)) for device in range(3))
    timeline = simulate(filled.with_num_steps(8), costs)
    assert timeline.step_s >= busiest_s - 1e-9


def two_teachers(num_steps: int) -> Program:
    """A student with a frozen teacher and a momentum teacher without delay."""
    one = with_teacher(gpipe(2, 2).program, 2, num_steps=num_steps)
    stages = (
        *(Stage("average", d, False, 0, (4 + d,)) for d in range(2)),
        *one.stages,
    )
    flows = ((0, 1), *((a + 2, b + 2) for a, b in one.flows), (1, 5))
    return Program((Net("average", 4), *one.nets), stages, flows, num_steps)


def test_several_nets_fill_one_order() -> None:
    """Each by its own rule: one runs a batch ahead, and one follows the update."""
    program = two_teachers(4)
    costs = Costs(
        (*[StageCost(0.5)] * 2, *[StageCost(1.0)] * 2, *[StageCost(1.0, 1.0, 1.0)] * 2)
    )
    filled = fill_with(gpipe(2, 2), program, ("teacher", "average"), costs=costs)
    assert check(filled).num_versions == (1,) * 6
    assert filled.with_num_steps(6).program.num_steps == 6


def test_outputs_are_gathered_a_batch_ahead() -> None:
    """Keys over all replicas: G follows the teacher's last forward, before the U."""
    text = """
replicas 2
net model microbatches=2 loss=replicas
stage 0 net=model device=0
stage 1 net=model device=1
flow 0>1
d0  0F0 0F1 0B0 0B1 0R 0U
d1  1F0 1F1 1G 1L 1B0 1B1 1R 1U
"""
    base = Schedule.parse(text)
    program = with_teacher(base.program, 2, num_steps=3)
    filled = fill_with(base, program, costs=equal_costs(program, 1.0))
    check(filled)
    ops = [*map(str, filled.lanes[1].ops)]
    assert ops.index("1G@1") < ops.index("3U")


def test_refuses_what_it_cannot_fill() -> None:
    """Each error names both facts, and the way out."""
    base = gpipe(2, 2)
    program = with_teacher(base.program, 2)
    costs = equal_costs(program, 1.0)
    refusals = (
        (base, program, "techer", "no net is named 'techer'; did you mean"),
        (base, program, "model", "net 'model' has backwards: its stages [2, 3]"),
        (add_messages(base), program, "teacher", "holds messages already"),
        (base.with_num_steps(2), program, "teacher", "is of 2 steps"),
        (gpipe(2, 3), program, "teacher", "microbatches of stages: [3, 3] in the"),
        (gpipe(3, 2), program, "teacher", "devices of stages: [0, 1, 2] in the"),
    )
    for schedule, whole, net, reason in refusals:
        with pytest.raises(PlanError) as caught:
            fill_with(schedule, whole, net, costs=costs)
        assert reason in str(caught.value)


def test_refuses_a_net_with_several_delays() -> None:
    """It would be ahead by as many batches as one of its stages may not be."""
    base = gpipe(2, 2)
    program = with_teacher(base.program, 2, delay=1)
    late = replace(program.stages[1], delay=2)
    program = replace(program, stages=(program.stages[0], late, *program.stages[2:]))
    with pytest.raises(PlanError, match=r"net 'teacher' have delays \[1, 2\]: use one"):
        fill_with(base, program, costs=equal_costs(program, 1.0))
