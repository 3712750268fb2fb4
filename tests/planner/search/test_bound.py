"""The bound that needs no search: nothing is ever faster, and often it is reached."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.core.costs import Costs, Link, StageCost
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.errors import ShapeError
from hocket.planner.search.problem import bound_s
from hocket.schedules import SCHEDULES, make_schedule
from tests.strategies import accepted, orders, shares


@given(schedule=orders(), share=shares(), latency_s=st.sampled_from([0.0, 0.5]))
@settings(max_examples=60)
def test_no_order_of_any_program_is_faster(
    schedule: Schedule, share: StageCost, latency_s: float
) -> None:
    """Teachers, skips, delays, replicas, several steps, in any order."""
    costs = Costs(
        (share,),
        is_device_share=True,
        link=Link(latency_s, 4.0),
        handling=Link(latency_s / 2),
    )
    least = bound_s(schedule.program, costs)

    assert least <= simulate(schedule, costs).makespan_s * (1 + 1e-9)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@given(data=st.data(), share=shares())
@settings(max_examples=10)
def test_no_published_schedule_is_faster(
    name: str, data: st.DataObject, share: StageCost
) -> None:
    """Whatever its shape."""
    schedule = SCHEDULES[name].make(data.draw(st.sampled_from(accepted(name))))
    costs = Costs((share,), is_device_share=True)
    least = bound_s(schedule.program, costs)

    assert least <= simulate(schedule, costs).makespan_s * (1 + 1e-9)


@given(p=st.integers(1, 6), m=st.integers(1, 12), share=shares())
def test_whole_backwards_are_bounded_by_the_time_of_1f1b(
    p: int, m: int, share: StageCost
) -> None:
    """(m + p - 1) (F + B): fill, work, drain."""
    costs = Costs((share,), is_device_share=True)
    schedule = make_schedule("1f1b", num_devices=p, num_microbatches=m)
    least = bound_s(schedule.program, costs, split_backward=False)

    assert least == pytest.approx(simulate(schedule, costs).makespan_s)


@given(p=st.integers(1, 6), m=st.integers(6, 20), share=shares())
def test_split_backwards_are_bounded_by_fill_and_work(
    p: int, m: int, share: StageCost
) -> None:
    """The last device's own work after the first forward's way; or the way back."""
    costs = Costs((share,), is_device_share=True)
    least = bound_s(Program.chain(range(p), m), costs)
    forward_s, input_s, weight_s = (
        share.forward_s,
        share.input_grad_s,
        share.weight_grad_s,
    )
    work_s = m * (forward_s + input_s + weight_s)

    assert least >= work_s + (p - 1) * forward_s - 1e-9
    back_s = (p - 1) * input_s + weight_s
    assert least >= (p - 1) * forward_s + m * (forward_s + input_s) + back_s - 1e-9


def test_a_slow_link_bounds_too() -> None:
    """Ten messages of two seconds each, one after another, between first and last."""
    share = StageCost(0.5, 0.5, 0.5, output_bytes=2)
    costs = Costs((share, share), link=Link(0.0, 1.0))
    least = bound_s(Program.chain([0, 1], 10), costs)

    # a forward, the messages, then at least a forward, I there and back, and W
    assert least == pytest.approx(0.5 + 20 + 0.5 + 0.5 + 0.5 + 0.5)


def test_a_refusing_schedule_is_no_excuse() -> None:
    """The bound is of programs: no schedule is asked whether it takes the numbers."""
    with pytest.raises(ShapeError):
        make_schedule("1f1b", num_devices=2, num_microbatches=3, stages_per_device=2)
    assert bound_s(Program.chain([0, 1, 0, 1], 3), Costs.uniform()) > 9
