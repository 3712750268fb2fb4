"""A timeline knows its makespan, bubbles, steady state and traffic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.core.costs import Costs, Link, StageCost
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.core.timelines.memory import Transfer
from hocket.core.timelines.timeline import Span, Timeline
from hocket.schedules import make_schedule
from tests.core.flush_free import two_buffered_weights

devices = st.integers(2, 5)
whole_seconds = st.integers(1, 9).map(float)


def measured(text: str, *lanes: list[tuple[float, float]]) -> Timeline:
    """A timeline as the runtime makes it: start and end of each op of each lane."""
    starts = tuple(np.array([start for start, _ in lane], float) for lane in lanes)
    ends = tuple(np.array([end for _, end in lane], float) for lane in lanes)
    return Timeline(Schedule.parse(text), starts, ends)


def test_makespan_is_from_first_start_to_last_end() -> None:
    """Whatever the clock showed at the start; gaps are bubble, per lane and in all."""
    timeline = measured(
        "d0  0F0 0B0\nd1  1F0 1B0",
        [(10.0, 12.0), (16.0, 18.0)],
        [(12.0, 13.0), (13.0, 16.0)],
    )

    assert timeline.begin_s == 10.0
    assert timeline.makespan_s == 8.0
    assert timeline.lane_bubble_fraction(0) == 0.5
    assert timeline.lane_bubble_fraction(1) == 0.5
    assert timeline.bubble_fraction == 0.5
    assert [*timeline.spans][1] == Span(
        0, timeline.schedule.lanes[0].ops[1], 16.0, 18.0
    )


def test_ops_that_only_start_something_are_no_work() -> None:
    """A reduction that runs on beside them does not make a lane busy."""
    timeline = measured(
        "replicas 2\nnet m microbatches=1\nstage 0 net=m device=0\nd0  0F0 0B0 0R 0U",
        [(0.0, 1.0), (1.0, 2.0), (2.0, 6.0), (6.0, 8.0)],
    )

    assert timeline.makespan_s == 8.0
    assert timeline.bubble_fraction == 0.5


def test_lane_without_work_is_all_bubble() -> None:
    """A second lane that does nothing counts as a lane."""
    timeline = measured("d0  0F0 0B0\nd0.1", [(0.0, 1.0), (1.0, 2.0)], [])

    assert timeline.lane_bubble_fraction(1) == 1.0
    assert timeline.bubble_fraction == 0.5


def test_nothing_takes_no_time() -> None:
    """Costs of nothing make a makespan and a bubble of 0."""
    timeline = simulate(
        make_schedule("1f1b", num_devices=2, num_microbatches=2),
        Costs((StageCost(), StageCost())),
    )

    assert timeline.makespan_s == 0.0
    assert timeline.bubble_fraction == 0.0
    assert timeline.steady_bubble_fraction == 0.0


@given(p=devices, more=st.integers(1, 9), f=whole_seconds, b=whole_seconds)
def test_1f1b_has_no_steady_bubble(p: int, more: int, f: float, b: float) -> None:
    """No device waits while the pipeline is full, if `m > p`."""
    schedule = make_schedule("1f1b", num_devices=p, num_microbatches=p + more)
    costs = Costs.uniform(forward_s=f, input_grad_s=b, weight_grad_s=0.0)
    timeline = simulate(schedule, costs)

    assert timeline.steady_bubble_fraction == pytest.approx(0.0, abs=1e-12)
    assert timeline.bubble_fraction > 0.0


@given(p=devices, m=st.integers(1, 9))
def test_gpipe_has_no_steady_state(p: int, m: int) -> None:
    """The first device ends its forwards before it begins a backward."""
    schedule = make_schedule("gpipe", num_devices=p, num_microbatches=m)
    timeline = simulate(schedule, Costs.uniform())

    assert timeline.steady_bubble_fraction == timeline.bubble_fraction
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


def test_steady_state_of_1f1b_by_hand() -> None:
    """From 0B0 (the last lane's first backward) to the end of 0F3; dots are idle.

    t    0 1 2 3 4 5 6 7 8 9
    d0   F F . . . B F B F . . B . . B
    d1   . . F B F B . . F B . F B . .
                   └───────┘
    """
    timeline = measured(
        "d0  0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3\nd1  1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
        [(0, 1), (1, 2), (5, 6), (6, 7), (7, 8), (8, 9), (11, 12), (14, 15)],
        [(2, 3), (3, 4), (4, 5), (5, 6), (8, 9), (9, 10), (11, 12), (12, 13)],
    )

    # The window is 5 to 9: d0 works all of it, d1 works 5-6 and 8-9.
    assert timeline.steady_bubble_fraction == pytest.approx((0 + 2 / 4) / 2)


@given(p=devices, num_steps=st.integers(1, 4))
def test_steps_with_flushes_between_each_have_a_steady_state(
    p: int, num_steps: int
) -> None:
    """The flush between two steps is no part of it."""
    schedule = make_schedule(
        "1f1b", num_devices=p, num_microbatches=3 * p, num_steps=num_steps
    )

    assert simulate(schedule, Costs.uniform()).steady_bubble_fraction == pytest.approx(
        0.0, abs=1e-12
    )


def test_evaluation_is_steady_when_every_device_has_begun() -> None:
    """Warm-up ends with the last device's first forward, if there is no backward."""
    schedule = make_schedule("forward-only", num_devices=3, num_microbatches=6)
    timeline = simulate(schedule, Costs.uniform())

    assert timeline.bubble_fraction == pytest.approx(2 / 8)
    assert timeline.steady_bubble_fraction == 0.0


def test_lane_of_weight_gradients_has_no_say_in_when_the_pipeline_is_full() -> None:
    """A lane of W alone ends no warm-up; its idle time counts as any."""
    schedule = Schedule.parse(
        "d0    0F0 0F1 0I0 0F2 0I1 0F3 0I2 0I3\nd0.1  0W0 0W1 0W2 0W3\n"
        "d1    1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"
    )
    timeline = simulate(schedule, Costs.uniform(weight_grad_s=0.0))

    # The window is 3 to 6, in which only the lane of 0W does nothing.
    assert timeline.steady_bubble_fraction == pytest.approx(1 / 3)


@given(
    p=devices,
    num_steps=st.integers(2, 8),
    f=whole_seconds,
    b=whole_seconds,
    w=whole_seconds,
)
def test_flush_free_order_has_no_steady_bubble(
    p: int, num_steps: int, f: float, b: float, w: float
) -> None:
    """PipeDream-2BW from its third step on, and in the whole only fill and drain."""
    schedule = two_buffered_weights(p, num_microbatches=p, num_steps=num_steps + 2)
    costs = Costs.uniform(forward_s=f, input_grad_s=b, weight_grad_s=w)
    timeline = simulate(schedule, costs)

    assert timeline.steady_bubble_fraction == pytest.approx(0.0, abs=1e-12)
    fill = (p - 1) / (p * (num_steps + 2) + p - 1)
    assert timeline.bubble_fraction == pytest.approx(fill)


def test_updates_between_steps_are_work() -> None:
    """A flush-free order in which every device updates at its own time."""
    schedule = two_buffered_weights(3, num_microbatches=3, num_steps=9)
    cost = StageCost(1.0, 1.0, 1.0, update_s=2.0)
    timeline = simulate(schedule, Costs((cost,) * 3))

    assert timeline.steady_bubble_fraction < 0.05


def test_bytes_are_counted_by_pair_of_devices() -> None:
    """Four outputs of 3 bytes there, four gradients of 5 back."""
    schedule = make_schedule("1f1b", num_devices=2, num_microbatches=4)
    cost = StageCost(1.0, 1.0, 1.0, output_bytes=3, input_grad_bytes=5)
    timeline = simulate(schedule, Costs((cost, cost), link=Link(0.5)))

    assert timeline.link_bytes() == {(0, 1): 12, (1, 0): 20}
    first = next(timeline.transfers)
    assert first == Transfer(schedule.lanes[0].ops[0], 0, 1, 1.0, 1.5, 3)
    assert timeline.traffic.lane.size == 8


def test_transfers_are_in_order_of_start() -> None:
    """Whichever lane they come from."""
    schedule = make_schedule("interleaved-1f1b", num_devices=3, num_microbatches=6)
    starts = [t.start_s for t in simulate(schedule, Costs.uniform()).transfers]

    assert starts == sorted(starts)
    assert starts


def test_measured_timeline_may_know_no_traffic() -> None:
    """A timeline without traffic lists no transfers and no bytes."""
    timeline = measured("d0  0F0 0B0", [(0.0, 1.0), (1.0, 2.0)])

    assert [*timeline.transfers] == []
    assert timeline.link_bytes() == {}


@pytest.mark.parametrize("name", ["pipedream-2bw", "wpipe", "wpipe-overlapped"])
def test_a_step_without_flushes_is_its_own_work(name: str) -> None:
    """Among others it waits for nothing, whatever the run has to fill and to drain."""
    for num_steps in (8, 20):
        order = make_schedule(
            name, num_devices=4, num_microbatches=6, num_steps=num_steps
        )
        timeline = simulate(order, Costs.uniform())
        assert timeline.step_s == pytest.approx(6 * 3.0)
        assert timeline.makespan_s > num_steps * 6 * 3.0


def test_a_step_with_flushes_is_its_share_of_all() -> None:
    """The step of a synchronous order is its makespan over its steps."""
    order = make_schedule("1f1b", num_devices=3, num_microbatches=4)
    alone = simulate(order, Costs.uniform())
    assert alone.step_s == alone.makespan_s
    three = simulate(order.with_num_steps(3), Costs.uniform())
    assert three.step_s == pytest.approx(three.makespan_s / 3)
