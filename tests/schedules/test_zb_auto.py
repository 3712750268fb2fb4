"""zb-auto: as good as what is made by hand, within its memory, for measured times."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hocket.core.check import check
from hocket.core.costs import Costs, Link, StageCost
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.core.timelines.timeline import Timeline
from hocket.errors import CostsError, FitError, ShapeError
from hocket.schedules import make_schedule

few = settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])


def auto(p: int, m: int, costs: Costs, memory_bytes: float | None = None) -> Schedule:
    """The schedule, by the way that users take."""
    return make_schedule(
        "zb-auto",
        num_devices=p,
        num_microbatches=m,
        costs=costs,
        memory_bytes=memory_bytes,
    )


def most_bytes(timeline: Timeline) -> float:
    """Of all devices."""
    return max(curve.peak for curve in timeline.memory)


@st.composite
def chains_of_costs(draw: st.DrawFn, num_devices: int) -> Costs:
    """Unequal devices, messages that take time, and what a device holds."""
    seconds = st.floats(0.5, 2.0)
    stages = tuple(
        StageCost(
            forward_s=draw(seconds),
            input_grad_s=draw(seconds),
            weight_grad_s=draw(seconds),
            output_bytes=draw(st.integers(0, 3)),
            input_grad_bytes=draw(st.integers(0, 3)),
            activation_bytes=draw(st.integers(5, 10)),
            weight_grad_held_bytes=draw(st.integers(0, 5)),
            weight_bytes=draw(st.integers(0, 20)),
            input_grad_work_bytes=draw(st.integers(0, 4)),
            weight_grad_work_bytes=draw(st.integers(0, 4)),
        )
        for _ in range(num_devices)
    )
    return Costs(stages, link=Link(draw(st.sampled_from([0.0, 0.1, 0.5])), 20.0))


@given(p=st.integers(1, 8), m=st.integers(1, 16))
@few
def test_equal_times_leave_nothing_but_the_filling(p: int, m: int) -> None:
    """No order is faster: the last device cannot begin before `(p - 1) * F`."""
    makespan_s = simulate(auto(p, m, Costs.uniform()), Costs.uniform()).makespan_s
    least_s = 3.0 * m + (p - 1) + max(0, p - m)
    assert makespan_s == least_s


@given(data=st.data(), p=st.integers(1, 5), m=st.integers(1, 10))
@few
def test_is_never_slower_than_what_is_made_by_hand(
    data: st.DataObject, p: int, m: int
) -> None:
    """The search is as fast as each handcrafted order that fits the memory."""
    costs = data.draw(chains_of_costs(p))
    rivals = [
        simulate(make_schedule(name, num_devices=p, num_microbatches=m), costs)
        for name in ("1f1b", "zb-h1", "zb-h2")
    ]
    for rival in rivals:
        limit = most_bytes(rival)
        timeline = simulate(auto(p, m, costs, limit), costs)
        assert most_bytes(timeline) <= limit
        assert timeline.makespan_s <= rival.makespan_s + 1e-9


@given(data=st.data(), p=st.integers(1, 5), m=st.integers(1, 10))
@few
def test_keeps_to_any_memory_that_holds_one_microbatch(
    data: st.DataObject, p: int, m: int
) -> None:
    """A smaller limit is refused with the smallest that works, and that works."""
    costs = data.draw(chains_of_costs(p))
    with pytest.raises(FitError, match="The smallest that works is") as caught:
        auto(p, m, costs, 0)
    least = caught.value.needed_bytes
    for limit in (least, least + 7, 2 * least, 4 * least):
        schedule = auto(p, m, costs, limit)
        check(schedule)
        assert most_bytes(simulate(schedule, costs)) <= limit
    with pytest.raises(FitError, match=f"memory_bytes is {least - 1}"):
        auto(p, m, costs, least - 1)


def test_more_memory_is_more_speed() -> None:
    """Up to ZB-H2's memory, for times of a transformer's layers."""
    share = StageCost(1.0, 1.1, 0.8, activation_bytes=10, weight_grad_held_bytes=8)
    costs = Costs((share,), is_device_share=True, link=Link(0.05))
    times = [
        simulate(auto(4, 12, costs, limit), costs).makespan_s
        for limit in (20, 30, 40, 50, 60, 70)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


@pytest.mark.parametrize("p", [2, 4, 6])
def test_is_zb_2p_and_in_the_memory_of_1f1b_zb_1p(p: int) -> None:
    """Each further step: `(p - 1)(F + I - W)` beside the work, and nothing beside it.

    As the paper has it, with the memory of `p` microbatches and of `2 p`.
    """
    m = 3 * p
    share = StageCost(1.0, 1.0, 1.0, activation_bytes=10, weight_grad_held_bytes=8)
    costs = Costs((share,), is_device_share=True)
    added = []
    for limit in (10 * p, 20 * p):
        order = auto(p, m, costs, limit)
        one, three = (
            simulate(order.with_num_steps(n), costs).makespan_s for n in (1, 3)
        )
        assert one == 3 * m + p - 1
        added.append((three - one) / 2)
    assert added == [3 * m + p - 1, 3 * m]


@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 9), (4, 4), (4, 9)])
def test_messages_that_take_time_are_hidden(p: int, m: int) -> None:
    """More forwards ahead hide messages: each costs its first way and no more."""
    message_s = 0.25
    costs = Costs.uniform(message_s=message_s)
    by_hand = simulate(make_schedule("zb-h1", num_devices=p, num_microbatches=m), costs)
    found = simulate(auto(p, m, costs), costs)
    assert found.makespan_s <= by_hand.makespan_s
    if m >= 2 * p:
        assert found.makespan_s == pytest.approx(3.0 * m + (p - 1) * (1 + message_s))


def test_refuses_what_it_does_not_take() -> None:
    """Several stages on a device, and costs of another pipeline."""
    with pytest.raises(ShapeError, match="zb-auto puts one stage on each device"):
        make_schedule("zb-auto", num_devices=2, num_microbatches=2, stages_per_device=2)
    with pytest.raises(CostsError, match="costs of 3 stages"):
        auto(2, 4, Costs((StageCost(1.0, 1.0, 1.0),) * 3))
