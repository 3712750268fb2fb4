"""Memory over time: what is alive, from when until when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hocket.errors import PlanError
from hocket.plan.costs import Costs, Link, StageCost, with_recompute
from hocket.plan.dataflow import Fact, Value, needs, version_read
from hocket.plan.memory import MemoryCurve, activation_units
from hocket.plan.op import BACKWARDS, MESSAGES, Kind, Op
from hocket.plan.schedule import Schedule
from hocket.plan.simulate import simulate
from hocket.plan.timeline import Timeline
from hocket.schedules import make_schedule
from tests.plan.flush_free import two_buffered_weights
from tests.plan.random_orders import costs_for, orders

Hold = tuple[int, float, float, int]  # device, begin_s, end_s, bytes
When = dict[Op, tuple[float, float]]  # start and end of every op


def test_curve_adds_up_changes_and_frees_first() -> None:
    """What is given back at an instant makes room for what is taken then."""
    curve = MemoryCurve.of_changes(
        np.array([3.0, 1.0, 1.0, 2.0]), np.array([-4.0, 4.0, 1.0, -1.0]), 10.0
    )
    swap = MemoryCurve.of_changes(np.array([1.0, 0.0, 1.0]), np.array([8.0, 8.0, -8.0]))

    assert curve.time_s.tolist() == [0.0, 1.0, 1.0, 2.0, 3.0]
    assert curve.amount.tolist() == [10.0, 11.0, 15.0, 14.0, 10.0]
    assert curve.peak == 15.0
    assert [curve.at(t) for t in (0.5, 1.0, 1.5, 9.0)] == [10.0, 15.0, 15.0, 10.0]
    assert swap.peak == 8.0


@given(p=st.integers(1, 5), m=st.integers(1, 8))
def test_1f1b_holds_as_many_activations_as_devices_follow(p: int, m: int) -> None:
    """`min(p - d, m)` units on device `d`; GPipe holds all `m` everywhere."""
    costs = Costs.uniform(activation_bytes=3)
    one_f_one_b = simulate(
        make_schedule("1f1b", num_devices=p, num_microbatches=m), costs
    )
    gpipe = simulate(make_schedule("gpipe", num_devices=p, num_microbatches=m), costs)

    for d in range(p):
        assert one_f_one_b.peak_activations(d) == min(p - d, m)
        assert one_f_one_b.peak_bytes(d) == 3 * min(p - d, m)
        assert gpipe.peak_activations(d) == m


def test_several_stages_share_one_unit() -> None:
    """Thirds of a unit add up to whole numbers, exactly."""
    schedule = make_schedule(
        "looped-bfs", num_devices=2, num_microbatches=6, stages_per_device=3
    )

    assert simulate(schedule, Costs.uniform()).peak_activations(0) == 6.0


def test_split_backward_gives_back_in_two_parts() -> None:
    """I frees what W does not need; W frees the rest."""
    schedule = Schedule.parse("d0  0F0 0I0 0F1 0W0 0I1 0W1 0U")
    cost = StageCost(1.0, 1.0, 1.0, activation_bytes=10, weight_grad_held_bytes=4)
    curve = simulate(schedule, Costs((cost,))).memory[0]

    assert [curve.at(t) for t in (0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5)] == [
        10.0,  # F0
        10.0,  # I0
        14.0,  # F1, and what W0 needs
        14.0,  # W0
        10.0,  # I1
        4.0,  # W1
        0.0,
    ]


def test_a_stage_that_recomputes_keeps_next_to_nothing() -> None:
    """By hand, on one device: between F and B the copies; all of it while B runs."""
    schedule = Schedule.parse("d0  0F0 0F1 0B1 0B0 0U")
    cost = StageCost(
        1.0,
        1.0,
        1.0,
        update_s=1.0,
        activation_bytes=100,
        forward_work_bytes=20,
        backward_work_bytes=8,
        update_work_bytes=5,
        replay_bytes=3,
    )
    kept = simulate(schedule, Costs((cost,)))
    again = simulate(schedule, with_recompute(Costs((cost,)), schedule.program, {0}))

    # F0 0-1, F1 1-2, B1 2-4, B0 4-6, U 6-7; a B that recomputes takes a second more
    instants = (0.5, 1.5, 3.0, 5.0, 6.5)
    assert [kept.memory[0].at(t) for t in instants] == [100, 200, 208, 108, 5]
    instants = (0.5, 1.5, 3.0, 6.0, 8.5)
    assert [again.memory[0].at(t) for t in instants] == [23, 26, 111, 108, 5]
    assert (kept.makespan_s, again.makespan_s) == (7.0, 9.0)


def test_a_reduction_packs_the_gradients_once_more() -> None:
    """Two replicas: while R runs, the gradients are there twice."""
    schedule = make_schedule("gpipe", num_devices=1, num_microbatches=1, num_replicas=2)
    cost = StageCost(1.0, 1.0, 1.0, gradient_bytes=40)
    curve = simulate(schedule, Costs((cost,), reduce_link=Link(1.0))).memory[0]

    # F 0-1, B 1-3, R 3-5 (two messages), then U, which takes no time
    assert [curve.at(t) for t in (2.5, 3.5, 5.5)] == [0.0, 80.0, 0.0]


def test_gradients_of_an_earlier_batch_are_there_from_the_start() -> None:
    """Accumulated over batches, they are added to; else a backward makes them."""
    schedule = make_schedule("gpipe", num_devices=1, num_microbatches=2)
    costs = Costs((StageCost(1.0, 1.0, 1.0, update_s=1.0, gradient_bytes=40),))
    fresh = simulate(schedule, costs).memory[0]
    added = simulate(schedule, replace(costs, accumulates=True)).memory[0]

    # F 0-2, B0 2-4, B1 4-6, U 6-7
    assert [fresh.at(t) for t in (0.5, 3.5, 4.5, 6.5, 7.5)] == [0, 0, 40, 40, 0]
    assert [added.at(t) for t in (0.5, 3.5, 4.5, 6.5, 7.5)] == [40, 40, 40, 40, 0]


def test_a_received_input_stays_until_the_backward() -> None:
    """Stage 1 receives 6 bytes, and needs them for the gradients of its weights."""
    schedule = make_schedule("gpipe", num_devices=2, num_microbatches=2)
    cost = StageCost(1.0, 1.0, 1.0, output_bytes=6)
    curve = simulate(schedule, Costs((cost, cost))).memory[1]

    # F0 1-2, F1 2-3, then two backwards
    assert [curve.at(t) for t in (1.5, 2.5, 4.0, 6.0)] == [6.0, 12.0, 12.0, 6.0]


def test_what_is_always_there() -> None:
    """Weights of every stage; gradients and optimizer state of trained ones alone.

    The gradients from the first backward on.
    """
    schedule = Schedule.parse(
        """
        net teacher microbatches=1
        net student microbatches=1
        stage 0 net=teacher device=0 trainable=no
        stage 1 net=student device=0
        flow 0>1
        d0  0F0 1F0 1B0 1U
        """
    )
    cost = StageCost(
        1.0,
        1.0,
        1.0,
        update_s=1.0,
        weight_bytes=100,
        gradient_bytes=10,
        optimizer_bytes=1,
    )
    curve = simulate(schedule, Costs((cost, cost))).memory[0]

    # F of the teacher 0-1, F 1-2, B 2-4, U 4-5
    assert [curve.at(t) for t in (0.5, 3.5, 4.5, 5.5)] == [201, 201, 211, 201]


def test_forward_only_output_stays_until_it_is_sent() -> None:
    """While F runs its activations; then its output, until that has arrived."""
    schedule = make_schedule("forward-only", num_devices=2, num_microbatches=1)
    cost = StageCost(2.0, activation_bytes=50, output_bytes=6)
    first, second = simulate(schedule, Costs((cost, cost), link=Link(1.0, 3.0))).memory

    # F on device 0 until 2, on the link until 4, usable at 5; F on device 1 until 7.
    assert [first.at(t) for t in (1.0, 3.0, 4.5, 5.5)] == [50.0, 6.0, 6.0, 0.0]
    assert [second.at(t) for t in (1.0, 3.0, 6.0, 8.0)] == [0.0, 6.0, 56.0, 0.0]


def test_synchronous_order_holds_one_version() -> None:
    """Nobody reads weights that have been updated, so nothing is kept for them."""
    schedule = make_schedule("1f1b", num_devices=2, num_microbatches=3, num_steps=3)
    cost = StageCost(1.0, 1.0, 1.0, update_s=1.0, weight_bytes=100)
    timeline = simulate(schedule, Costs((cost, cost)))

    assert [curve.peak for curve in timeline.memory] == [100.0, 100.0]
    assert all((curve.amount == 100.0).all() for curve in timeline.memory)


def test_delay_of_one_keeps_a_second_version() -> None:
    """PipeDream-2BW: step `t` reads version `t - 1` when `t` is there: two at once."""
    schedule = two_buffered_weights(num_devices=3, num_microbatches=4, num_steps=5)
    cost = StageCost(1.0, 1.0, 1.0, weight_bytes=100)
    timeline = simulate(schedule, Costs((cost,) * 3))

    peaks = [timeline.peak_bytes(d) for d in range(3)]
    assert peaks == [200.0, 200.0, 200.0]


def test_version_is_kept_from_its_overwriting_to_its_last_reader() -> None:
    """By hand: step 1 still reads version 0 when U makes version 1."""
    schedule = Schedule.parse(
        """
        steps 2
        net model microbatches=1
        stage 0 net=model device=0 delay=1
        d0  0F0 0F0@1 0B0 0U 0B0@1 0U@1
        """
    )
    cost = StageCost(1.0, 1.0, 1.0, update_s=1.0, weight_bytes=100)
    curve = simulate(schedule, Costs((cost,))).memory[0]

    # F 0-1, F 1-2, B 2-4, U 4-5, B@1 5-7, U@1 7-8
    assert [curve.at(t) for t in (3.5, 4.5, 6.5, 7.5)] == [100, 200, 200, 100]


def test_timeline_without_bytes_says_so() -> None:
    """A measured timeline may not know them."""
    timeline = simulate(Schedule.parse("d0  0F0 0B0 0U"), Costs.uniform())
    bare = Timeline(timeline.schedule, timeline.start_s, timeline.end_s)

    assert bare.peak_activations(0) == 1.0
    with pytest.raises(PlanError, match="holds no bytes over time"):
        bare.peak_bytes(0)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(schedule=orders(), data=st.data())
def test_curves_are_what_definitions_add_up_to(
    schedule: Schedule, data: st.DataObject
) -> None:
    """Between any two instants, the sum over all that is held then, op by op."""
    costs = data.draw(costs_for(schedule.program))
    timeline = simulate(schedule, costs)
    holds = [*holds_of(timeline, costs)]
    ends = {time for _, begin, end, _ in holds for time in (begin, end)}
    changes = {float(t) for curve in timeline.memory for t in curve.time_s}
    instants = sorted(t for t in {0.0} | ends | changes if 0.0 <= t < float("inf"))

    for begin, end in pairwise([*instants, instants[-1] + 1.0]):
        middle = (begin + end) / 2
        expected = [0] * schedule.program.num_devices
        for device, from_s, until_s, num_bytes in holds:
            if from_s < middle < until_s:
                expected[device] += num_bytes
        assert [curve.at(middle) for curve in timeline.memory] == expected


@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(schedule=orders())
def test_activation_units_are_bytes_of_equal_stages(schedule: Schedule) -> None:
    """With as many bytes per microbatch as a device has stages, both curves agree."""
    costs = Costs(
        tuple(
            StageCost(1.0, 1.0, 1.0, 1.0, 1.0, activation_bytes=60)
            for _ in schedule.program.stages
        )
    )
    timeline = simulate(schedule, costs)

    for device, stages in enumerate(schedule.program.stages_on):
        units = activation_units(timeline, device)
        assert units.peak * len(stages) * 60 == timeline.peak_bytes(device)


def holds_of(timeline: Timeline, costs: Costs) -> Iterator[Hold]:
    """Everything that is held, one by one, straight from what the module promises."""
    forever = float("inf")
    program = timeline.schedule.program
    stage_costs = costs.of(program)
    for stage, cost in zip(program.stages, stage_costs, strict=True):
        yield stage.device, -1.0, forever, cost.weight_bytes
        if stage.trainable:
            yield stage.device, -1.0, forever, cost.optimizer_bytes
    when = {span.op: (span.start_s, span.end_s) for span in timeline.spans}
    for op, (start_s, end_s) in when.items():
        device, cost = program.stages[op.stage].device, stage_costs[op.stage]
        yield device, start_s, end_s, work_bytes(op, cost)
        if op.kind in BACKWARDS | {Kind.FORWARD}:
            yield from local_holds(op, timeline, costs, when)
        if op.kind is Kind.FORWARD:
            yield from forward_holds(op, timeline, costs, when)
        elif op.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            yield device, *gradient_span(op, when), cost.gradient_bytes
        elif op.kind is Kind.UPDATE:
            reads = [
                when[reader][1]
                for reader in when
                if op.step in versions_read(reader, op.stage, timeline)
            ]
            yield device, start_s, max(reads, default=start_s), cost.weight_bytes
    yield from received_holds(timeline, when)


def gradient_span(op: Op, when: When) -> tuple[float, float]:
    """How long a step's gradients are there; nothing for all but the first that makes.

    From the end of the first backward until the update's end, where there is one.
    """
    makers = [
        other
        for other in when
        if other.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        and (other.stage, other.step) == (op.stage, op.step)
    ]
    first = min(makers, key=lambda other: when[other][1])
    begin_s = when[first][1]
    if op != first:
        return begin_s, begin_s
    update = Op(Kind.UPDATE, op.stage, None, op.step)
    return begin_s, when[update][1] if update in when else max(
        e for _, e in when.values()
    )


def work_bytes(op: Op, cost: StageCost) -> int:
    """What an op holds while it runs, and no longer."""
    match op.kind:
        case Kind.FORWARD:
            return cost.forward_work_bytes if cost.recomputes else 0
        case Kind.BACKWARD | Kind.BACKWARD_INPUT:
            return cost.backward_work_bytes
        case Kind.REDUCE:
            return cost.gradient_bytes
        case Kind.UPDATE:
            return cost.update_work_bytes
        case _:
            return 0


def released_s(reader: Op, when: When) -> float:
    """When an op needs no more what it read: a forward when its backward has ended."""
    kinds = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    backwards = [
        Op(kind, reader.stage, reader.microbatch, reader.step)
        for kind in (kinds if reader.kind is Kind.FORWARD else ())
    ]
    return max(when[op][1] for op in (reader, *backwards) if op in when)


def local_holds(op: Op, timeline: Timeline, costs: Costs, when: When) -> Iterator[Hold]:
    """What a stage of the same device reads stays until it has no more use for it."""
    program = timeline.schedule.program
    stage, cost = program.stages[op.stage], costs.of(program)[op.stage]
    if not stage.trainable:
        return
    is_forward = op.kind is Kind.FORWARD
    fact = Fact.OUTPUT if is_forward else Fact.INPUT_GRAD
    value = Value(fact, op.stage, op.microbatch, op.step)
    reads = [
        released_s(reader, when)
        for reader in when
        if program.stages[reader.stage].device == stage.device
        and reader.stage != op.stage
        and reader.kind not in MESSAGES
        and value in needs(reader, program)
    ]
    size = cost.output_bytes if is_forward else cost.input_grad_bytes
    end_s = when[op][1]
    yield stage.device, end_s, max(reads, default=end_s), size


def forward_holds(
    op: Op, timeline: Timeline, costs: Costs, when: When
) -> Iterator[Hold]:
    """What a forward leaves behind, and what is made again in a backward."""
    program = timeline.schedule.program
    stage = program.stages[op.stage]
    cost = costs.of(program)[op.stage]
    start_s, end_s = when[op]
    backward, into, weight = (
        when.get(Op(kind, op.stage, op.microbatch, op.step))
        for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    whole, kept = cost.activation_bytes, cost.kept_bytes
    back = backward or into
    if back:
        yield stage.device, start_s, back[1], kept
        yield stage.device, *back, whole - kept
        if weight:
            yield stage.device, back[1], weight[1], cost.weight_grad_held_bytes
    else:
        yield stage.device, start_s, end_s, cost.activation_bytes
        output = Value(Fact.OUTPUT, op.stage, op.microbatch, op.step)
        uses = [
            when[reader][1] if reader.stage == op.stage else released_s(reader, when)
            for reader in when
            if program.stages[reader.stage].device == stage.device
            and output in needs(reader, program)
        ]
        sent = [t.end_s for t in timeline.transfers if t.op == op]
        last = max([*uses, *sent], default=end_s)
        yield stage.device, end_s, last, cost.output_bytes


def versions_read(reader: Op, stage: int, timeline: Timeline) -> set[int]:
    """Which versions of a stage's weights an op reads, besides its own update."""
    program = timeline.schedule.program
    if reader.stage == stage:
        reads = reader.kind is Kind.FORWARD or reader.kind in BACKWARDS
        return {version_read(stage, reader.step, program)} if reads else set()
    is_follower = stage in program.stages[reader.stage].follows
    return {reader.step + 1} if reader.kind is Kind.UPDATE and is_follower else set()


def received_holds(timeline: Timeline, when: When) -> Iterator[Hold]:
    """Messages at the device where they arrive."""
    program = timeline.schedule.program
    receives = {op: span for op, span in when.items() if op.kind in MESSAGES}
    for transfer in timeline.transfers:
        if transfer.op.kind is Kind.REDUCE:
            continue
        forward = transfer.op.kind is Kind.FORWARD
        fact = Fact.OUTPUT if forward else Fact.INPUT_GRAD
        made = transfer.op
        value = Value(fact, made.stage, made.microbatch, made.step)
        uses = [
            released_s(reader, when)
            for reader in when
            if program.stages[reader.stage].device == transfer.to_device
            and reader.kind not in MESSAGES
            and value in needs(reader, program)
        ]
        kind = Kind.RECEIVE_FORWARD if forward else Kind.RECEIVE_BACKWARD
        posted = [
            start_s
            for op, (start_s, _) in receives.items()
            if (op.kind, op.peer) == (kind, made.stage)
            and (op.microbatch, op.step) == (made.microbatch, made.step)
            and program.stages[op.stage].device == transfer.to_device
        ]
        begin = posted[0] if posted else transfer.start_s
        yield transfer.to_device, begin, max(uses), transfer.num_bytes
