"""Memory over time: what is alive, from when until when."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.core.costs import Costs, Link, StageCost, with_recompute
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.core.timelines.memory import MemoryCurve
from hocket.core.timelines.timeline import Timeline
from hocket.errors import PlanError
from hocket.schedules import make_schedule
from tests.core.flush_free import two_buffered_weights


def test_curve_adds_up_changes_and_frees_first() -> None:
    """Frees at an instant make room for allocations at that instant."""
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


def test_a_microbatch_is_there_until_its_w() -> None:
    """Until W where the backward is split, until B where it is not."""
    split = simulate(Schedule.parse("d0  0F0 0I0 0F1 0I1 0W0 0W1 0U"), Costs.uniform())
    whole = simulate(Schedule.parse("d0  0F0 0B0 0F1 0B1 0U"), Costs.uniform())

    assert (split.peak_activations(0), split.peak_microbatches(0)) == (1, 2)
    assert (whole.peak_activations(0), whole.peak_microbatches(0)) == (1, 1)


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


def test_i_and_w_hold_what_they_work_with_while_they_run() -> None:
    """Each its own; and W may hold more than the forward left."""
    schedule = Schedule.parse("d0  0F0 0I0 0F1 0I1 0W0 0W1 0U")
    cost = StageCost(
        1.0,
        1.0,
        1.0,
        activation_bytes=10,
        weight_grad_held_bytes=14,
        backward_work_bytes=100,
        input_grad_work_bytes=5,
        weight_grad_work_bytes=3,
    )
    curve = simulate(schedule, Costs((cost,))).memory[0]

    assert [curve.at(t) for t in (0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5)] == [
        10.0,  # F0
        15.0,  # I0
        24.0,  # F1, and what W0 needs
        29.0,  # I1
        31.0,  # W0
        17.0,  # W1
        0.0,
    ]


def test_a_stage_that_recomputes_keeps_next_to_nothing() -> None:
    """A hand-computed device holds copies between F and B, and all while B runs."""
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
    """No op reads weights that have been updated, so no older version is kept."""
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
    """Step 1 still reads version 0 when U makes version 1, computed by hand."""
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
