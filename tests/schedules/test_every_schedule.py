"""Every schedule of the table keeps these claims.

A new schedule needs no test here: it is in the table, so all of these run on it.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hocket.core.check import check
from hocket.core.checker.links import Links
from hocket.core.costs import Costs, Link, StageCost
from hocket.core.dataflow import due_ops
from hocket.core.op import Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.errors import PlanError
from hocket.passes.add_messages import add_messages, drop_messages
from hocket.schedules import SCHEDULES, Shape, make_schedule
from tests.player import ends_with_messages, seconds_of, times_of
from tests.strategies import accepted, equal_shares, shapes, shares

# All tests of one schedule run in one process, which makes each of its orders once.
every_schedule = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xdist_group(f"orders of {name}"))
        for name in sorted(SCHEDULES)
    ],
)
few = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])

HALVES: Final = {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
GOLDEN_SHAPES: Final = (Shape(2, 4, 1), Shape(4, 8, 1), Shape(2, 4, 2), Shape(4, 8, 2))
GOLDEN_BUCKETS: Final = (
    Shape(1, 1, 4, num_steps=3, num_replicas=2),
    Shape(1, 2, 4, num_steps=3, num_replicas=2),
)


@cache
def made(name: str, shape: Shape) -> Schedule:
    """The schedule, by the way that users take."""
    return make_schedule(
        name,
        num_devices=shape.num_devices,
        num_microbatches=shape.num_microbatches,
        stages_per_device=shape.stages_per_device,
        num_steps=shape.num_steps,
        num_replicas=shape.num_replicas,
    )


def idle_s(schedule: Schedule, share: StageCost, makespan_s: float) -> list[float]:
    """What is left of the makespan on each device after its work."""
    stages_on = schedule.program.stages_on
    return [
        makespan_s
        - sum(seconds_of(op, share) / len(stages_on[lane.device]) for op in lane.ops)
        for lane in schedule.lanes
    ]


@every_schedule
def test_takes_more_than_a_few_sizes(name: str) -> None:
    """Constraints that refused nearly everything would make all tests below empty."""
    sizes = {(shape.num_devices, shape.num_microbatches) for shape in accepted(name)}
    if SCHEDULES[name].is_data_parallel:
        assert sizes >= {(1, m) for m in range(1, 9)}
        return
    assert {p for p, _ in sizes} >= {2, 4}
    assert {(4, 8), (2, 8)} <= sizes or name == "pipedream"  # of one microbatch a step


@every_schedule
@few
@given(data=st.data())
def test_is_complete_and_what_was_asked_for(name: str, data: st.DataObject) -> None:
    """It has all ops, can be played with what it claims, and its text says it all.

    A doubled or forgotten gradient is a wrong model, not a slow one. No lane waits for
    ever, with rendezvous sends and so many buffers, or fewer; nor over NCCL, where a
    posted receive may hold up all that its device was given later.
    """
    shape = data.draw(shapes(name))
    schedule = made(name, shape)

    _check_shape(schedule.program, shape)
    found = Counter(op for lane in schedule.lanes for op in lane.ops)
    assert set(found.values()) == {1}
    halves = [{replace(op, kind=k) for op in found if op.kind is k} for k in HALVES]
    wholes = {replace(op, kind=Kind.BACKWARD) for op in found if op.kind in HALVES}
    assert len(wholes) == len(halves[0]) == len(halves[1])
    assert {op for op in found if op.kind not in HALVES} | wholes == set(
        due_ops(schedule.program)
    )

    assert check(schedule).num_buffers == SCHEDULES[name].num_buffers(shape)
    check(schedule, links=Links.ONE_QUEUE)

    assert Schedule.parse(str(schedule)) == schedule
    full = add_messages(schedule)
    assert Schedule.parse(str(full)) == full


def _check_shape(program: Program, shape: Shape) -> None:
    """No number of the shape is lost on the way; microbatches are the trained nets'."""
    trained = {stage.net for stage in program.stages if stage.trainable}
    nets = [net for net in program.nets if net.name in trained or not trained]
    assert program.num_devices == shape.num_devices
    assert program.num_stages == shape.num_devices * shape.stages_per_device
    assert sum(net.num_microbatches for net in nets) == shape.num_microbatches
    assert program.num_steps == shape.num_steps
    assert program.num_pipelines == shape.num_replicas


@every_schedule
@few
@given(data=st.data())
def test_messages_go_with_one_buffer_and_cost_no_time(
    name: str, data: st.DataObject
) -> None:
    """Receives posted late, for want of buffers or order, still come in time."""
    schedule = made(name, data.draw(shapes(name)))
    shared_channel = data.draw(st.booleans())
    num_buffers = data.draw(st.integers(1, 3))
    full = add_messages(
        schedule, num_buffers=num_buffers, shared_channel=shared_channel
    )
    check(full)
    assert ends_with_messages(full, shared_channel=shared_channel)
    assert drop_messages(full).lanes == schedule.lanes
    costs = Costs.uniform()
    assert simulate(full, costs).makespan_s == pytest.approx(
        simulate(schedule, costs).makespan_s
    )


@every_schedule
@few
@given(data=st.data(), share=st.one_of(shares(), equal_shares()))
def test_bubble_is_what_it_claims(
    name: str, data: st.DataObject, share: StageCost
) -> None:
    """The formula of the schedule's file, for any times that it is given for."""
    shape = data.draw(shapes(name))
    assume(SCHEDULES[name].holds_for(shape, share))
    schedule = made(name, shape)
    timeline = simulate(schedule, Costs((share,), is_device_share=True))
    claim_s = SCHEDULES[name].bubble_s(shape, share)
    for device_idle_s in idle_s(schedule, share, timeline.makespan_s):
        assert device_idle_s == pytest.approx(claim_s, abs=1e-9)


@every_schedule
@few
@given(data=st.data(), share=shares(), message_s=st.sampled_from([0.0, 0.25, 1.5]))
def test_times_and_peaks_are_what_they_must_be(
    name: str, data: st.DataObject, share: StageCost, message_s: float
) -> None:
    """Activations as the schedule's file has them; times as the plainest player's.

    Simulator and player share nothing but `dataflow`.
    """
    shape = data.draw(shapes(name))
    schedule = made(name, shape)
    costs = Costs((share,), is_device_share=True)
    timeline = simulate(schedule, costs)
    for device in range(shape.num_devices):
        claim = SCHEDULES[name].peak_activations(shape, device)
        assert timeline.peak_activations(device) == pytest.approx(claim)

    expected = times_of(schedule, share, message_s)
    if message_s:
        slower = replace(costs, link=Link(latency_s=message_s))
        timeline = simulate(schedule, slower)
    works = {Kind.FORWARD, Kind.BACKWARD, *HALVES, Kind.UPDATE}
    for span in timeline.spans:
        if span.op.kind in works:
            assert (span.start_s, span.end_s) == pytest.approx(expected[span.op])


@every_schedule
def test_travels_as_csv(name: str, tmp_path: Path) -> None:
    """PyTorch's format and back, for every order that it can hold."""
    for shape in accepted(name)[::7]:
        schedule = made(name, shape)
        if not _is_plain(schedule):
            with pytest.raises(PlanError):
                schedule.to_csv(tmp_path / "order.csv")
            continue
        schedule.to_csv(tmp_path / "order.csv")
        plain = replace(schedule, body=(), num_repeats=0)  # the format has none
        assert Schedule.from_csv(tmp_path / "order.csv") == plain


def _is_plain(schedule: Schedule) -> bool:
    stages = schedule.program.stages
    return len(schedule.program.nets) == 1 and not any(s.delay for s in stages)


@every_schedule
@few
@given(data=st.data(), num_steps=st.integers(3, 6))
def test_continues_for_more_steps(
    name: str, data: st.DataObject, num_steps: int
) -> None:
    """An order for some steps is the beginning of the order for more."""
    shape = data.draw(shapes(name))
    schedule = made(name, shape)
    if any(stage.delay for stage in schedule.program.stages) and not schedule.body:
        with pytest.raises(PlanError):  # too short to say how it goes on
            schedule.with_num_steps(shape.num_steps + 1)
        return
    if not schedule.body:
        shape = replace(shape, num_steps=1)
        if made(name, replace(shape, num_steps=num_steps)).body:
            check(made(name, shape).with_num_steps(num_steps))  # ends every step
            return
    more = made(name, shape).with_num_steps(num_steps)
    assert more == made(name, replace(shape, num_steps=num_steps))
    check(more)


@every_schedule
@few
@given(data=st.data())
def test_reduces_each_gradient_as_soon_as_it_is_complete(
    name: str, data: st.DataObject
) -> None:
    """R follows the stage's last weight gradient at once, if there are replicas."""
    shape = replace(data.draw(shapes(name)), num_replicas=2)
    schedule = made(name, shape)
    gradients = {Kind.BACKWARD, Kind.BACKWARD_WEIGHT}
    for lane in schedule.lanes:
        last: dict[tuple[int, int], Op] = {}
        for before, op in zip(lane.ops, lane.ops[1:], strict=False):
            if before.kind in gradients:
                last[before.stage, before.step] = before
            if op.kind is Kind.REDUCE:
                assert before == last[op.stage, op.step]


@every_schedule
def test_orders_are_those_we_know(
    name: str, golden: Callable[[str, str], None]
) -> None:
    """A change of an order is seen as a change of a file, and never by accident."""
    known = [shape for shape in GOLDEN_SHAPES if shape in accepted(name)]
    if SCHEDULES[name].is_data_parallel:
        known = [*GOLDEN_BUCKETS]
    pictures = [f"# {_title(name, shape)}\n{made(name, shape)}\n" for shape in known]
    golden(f"schedules/{name}.txt", "\n".join(pictures))


def _title(name: str, shape: Shape) -> str:
    numbers = shape.num_devices, shape.num_microbatches, shape.stages_per_device
    return "{}: {} devices, {} microbatches, {} stages per device".format(
        name, *numbers
    )


@every_schedule
def test_names_its_source_and_shows_its_picture(name: str) -> None:
    """Every schedule's docstring names its source and shows its picture."""
    text = inspect.getdoc(SCHEDULES[name].make) or ""
    assert "Source: " in text
    assert ">>> print(" in text
    assert SCHEDULES[name].summary.endswith(".")
