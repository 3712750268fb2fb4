"""What gathers cost: the seconds that no op hides, and the bytes of whole weights."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hocket.core.costs import Costs, Link, StageCost, with_slow_device
from hocket.core.op import COLLECTIVES, Kind
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.core.simulate import long_step_s, simulate
from hocket.core.simulator.clocks import play_events, play_in_order
from hocket.core.simulator.memory import peak_parts
from hocket.core.simulator.work import prepare
from hocket.core.timelines.causality import PathKind, critical_path
from hocket.passes.add_gathers import KEEPS, Keep, Keeps, add_gathers
from hocket.schedules import make_schedule
from tests.core.holds import assert_curves_add_up
from tests.core.random_orders import costs_for
from tests.core.slow_clock import SlowClock
from tests.core.support.spans import spans
from tests.strategies import orders, programs

many = settings(
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
EACH = StageCost(forward_s=2.0, input_grad_s=2.0, weight_grad_s=1.0, update_s=1.0)
FORWARD_S, BACKWARD_S = 2.0, 3.0


def costs_of(
    gathers_s: list[float],
    *,
    weight_bytes: int = 0,
    whole_bytes: int = 0,
    gradient_bytes: int = 0,
) -> Costs:
    """Equal stages, but for the seconds of their gathers."""
    each = replace(
        EACH,
        weight_bytes=weight_bytes,
        whole_bytes=whole_bytes,
        gradient_bytes=gradient_bytes,
    )
    return Costs(tuple(replace(each, unshard_s=seconds) for seconds in gathers_s))


def chain_on_one_device(num_stages: int, keeps: Keeps) -> Schedule:
    """One microbatch through all stages and back."""
    stages = range(num_stages)
    lane = [f"{s}F0" for s in stages]
    lane += [f"{s}B0 {s}R" for s in reversed(stages)] + [f"{s}U" for s in stages]
    lines = ["steps 1", "replicas 1", "shards 2", "net model microbatches=1"]
    lines += [f"stage {s} net=model device=0" for s in stages]
    lines += [f"flow {s}>{s + 1}" for s in stages[:-1]]
    text = "\n".join([*lines, f"d0 {' '.join(lane)}"])
    return add_gathers(Schedule.parse(text), keeps)


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("gather_s", [0.5, 2.0, 7.0])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
def test_gathers_behind_compute_take_no_time(
    name: str, gather_s: float, num_steps: int
) -> None:
    """Of all stages but the first, which has nothing to compute before its own."""

    def makespan_s(first_s: float, others_s: float, num_shards: int) -> float:
        schedule = make_schedule(
            name,
            num_devices=3,
            num_microbatches=6,
            num_steps=num_steps,
            num_replicas=3 - num_shards,
            num_shards=num_shards,
        )
        costs = costs_of([first_s, others_s, others_s])
        return simulate(schedule, costs).makespan_s

    bare_s = makespan_s(0.0, 0.0, 1)
    hidden_s = min(gather_s, FORWARD_S)

    assert makespan_s(0.0, hidden_s, 2) == bare_s
    assert makespan_s(gather_s, gather_s, 2) == bare_s + num_steps * gather_s


@pytest.mark.parametrize("gather_s", [0.0, 1.0, 2.5, 10.0])
def test_what_no_op_hides_makes_a_step_longer(gather_s: float) -> None:
    """One stage has no other op to hide behind; of two, each gather has one op."""
    bare_s = FORWARD_S + BACKWARD_S + EACH.update_s
    once = costs_of([gather_s])
    for keeps in KEEPS:
        num_gathers = 2 if keeps == "op" else 1
        schedule = chain_on_one_device(1, keeps)
        assert simulate(schedule, once).makespan_s == bare_s + num_gathers * gather_s

    two = costs_of([gather_s, gather_s])
    beside_s = max(0.0, gather_s - FORWARD_S), max(0.0, gather_s - BACKWARD_S)
    step, run = (chain_on_one_device(2, keeps) for keeps in KEEPS[:2])
    late_s = simulate(step, two).makespan_s - 2 * bare_s
    assert late_s == pytest.approx(gather_s + beside_s[0])
    late_s = simulate(run, two).makespan_s - 2 * bare_s
    assert late_s == pytest.approx(gather_s + sum(beside_s))


def test_spans_and_traffic() -> None:
    """An UNSHARD ends when the weights are whole; its lane has gone on meanwhile."""
    schedule = chain_on_one_device(2, "run")
    timeline = simulate(schedule, costs_of([1.0, 4.0], whole_bytes=8))
    at = spans(timeline)

    assert at["0UNSHARD0"] == (0.0, 1.0)
    assert at["1UNSHARD0"] == (0.0, 5.0)  # behind that of stage 0, on one link
    assert (at["0F0"], at["1F0"]) == ((1.0, 3.0), (5.0, 7.0))
    assert at["0RESHARD0"] == (3.0, 3.0)
    gathers = [t for t in timeline.transfers if t.op.kind is Kind.UNSHARD]
    assert [(str(t.op), t.start_s, t.end_s, t.num_bytes) for t in gathers] == [
        ("0UNSHARD0", 0.0, 1.0, 8),
        ("1UNSHARD0", 1.0, 5.0, 8),
        ("0UNSHARD1", 7.0, 8.0, 8),
    ]
    assert critical_path(timeline).seconds[PathKind.REDUCTION] == 5.0
    assert long_step_s(schedule, costs_of([1.0, 4.0])) == timeline.makespan_s


def test_collectives_of_a_device_go_one_after_another() -> None:
    """A gather waits for a reduction that was posted before it, and the other way."""
    schedule = chain_on_one_device(3, "op")
    slow = replace(costs_of([4.0] * 3, gradient_bytes=20), reduce_link=Link(0.0, 1.0))
    timeline = simulate(schedule, slow)
    collectives = [t for t in timeline.transfers if t.op.kind in COLLECTIVES]

    posted = [op for op in schedule.lanes[0].ops if op.kind in COLLECTIVES]
    assert [t.op for t in collectives] == posted
    assert all(a.end_s <= b.start_s for a, b in pairwise(collectives))
    assert any(a.end_s == b.start_s for a, b in pairwise(collectives))


@pytest.mark.parametrize(("keeps", "num_whole"), [("step", 4), ("run", 2), ("op", 2)])
def test_peak_bytes(keeps: Keep, num_whole: int) -> None:
    """Whole weights of all four stages, or of one, and of the next that is gathered."""
    schedule = chain_on_one_device(4, keeps)
    costs = costs_of([1.0] * 4, weight_bytes=10, whole_bytes=20)
    timeline = simulate(schedule, costs)
    (parts,) = peak_parts(timeline, costs)

    assert timeline.peak_bytes(0) == 4 * 10 + num_whole * 20
    assert parts.weight_bytes == timeline.peak_bytes(0) == parts.total_bytes


def test_a_slow_device_has_no_slower_link() -> None:
    """Its gathers take what they took, as its reductions do."""
    slowed = with_slow_device(costs_of([1.0]), Program.chain([0], 1), 0, 3.0)

    assert (slowed.stages[0].unshard_s, slowed.stages[0].forward_s) == (1.0, 6.0)


def no_delays(program: Program) -> Program:
    """The same program of one step, sharded, reading the newest weights."""
    stages = tuple(replace(stage, delay=0) for stage in program.stages)
    return replace(program, stages=stages, num_steps=1, num_shards=2)


@st.composite
def gathered_orders(draw: st.DrawFn) -> Schedule:
    """Any order of any program of sharded stages."""
    order = draw(orders(programs().map(no_delays)))
    order = order.with_num_steps(draw(st.integers(1, 2)))
    return add_gathers(order, draw(st.sampled_from(KEEPS)))


def with_gathers(costs: Costs, data: st.DataObject) -> Costs:
    """The same costs, and some for gathers."""
    numbers = st.integers(0, 5)
    stages = tuple(
        replace(
            stage,
            unshard_s=float(data.draw(numbers)),
            whole_bytes=data.draw(numbers),
        )
        for stage in costs.stages
    )
    return replace(costs, stages=stages)


@many
@given(schedule=gathered_orders(), data=st.data())
def test_any_order_is_as_slow_clock_says(
    schedule: Schedule, data: st.DataObject
) -> None:
    """Start and end of every op, exactly; by both clocks alike."""
    if schedule.program.gathered_stages:
        return  # the slow clock knows no op G
    drawn = data.draw(costs_for(schedule.program, shared=False))
    costs = with_gathers(drawn, data)
    slow = SlowClock(schedule, costs)
    slow.run()

    timeline = simulate(schedule, costs)

    for i, lane in enumerate(schedule.lanes):
        places = [(i, j) for j in range(len(lane.ops))]
        assert timeline.start_s[i].tolist() == [slow.start[place] for place in places]
        assert timeline.end_s[i].tolist() == [slow.end[place] for place in places]
    work = prepare(schedule, costs)
    first, second = play_in_order(work), play_events(work, costs)
    assert all(map(np.array_equal, first.times, second.times))


@many
@given(schedule=gathered_orders(), data=st.data())
def test_bytes_are_what_definitions_add_up_to(
    schedule: Schedule, data: st.DataObject
) -> None:
    """At every instant, on every device."""
    if schedule.program.gathered_stages:
        return
    costs = with_gathers(data.draw(costs_for(schedule.program, shared=False)), data)

    assert_curves_add_up(simulate(schedule, costs), costs)
