"""Costs found from steps explain those steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.core.costs import Costs, Link, StageCost
from hocket.core.schedule import Schedule
from hocket.core.simulate import observed, simulate
from hocket.core.timelines.fit import fit
from hocket.core.timelines.timeline import Origin
from hocket.schedules import make_schedule

SECONDS = st.floats(1e-3, 4e-3)
STAGES = st.builds(
    StageCost,
    forward_s=SECONDS,
    input_grad_s=SECONDS,
    weight_grad_s=SECONDS,
    output_bytes=st.just(1 << 14),
    input_grad_bytes=st.just(1 << 14),
)
FEW_US = st.floats(0.0, 60e-6)


@pytest.mark.parametrize(
    ("name", "num_stages"),
    [
        *(("gpipe", 2), ("1f1b", 3), ("interleaved-1f1b", 4), ("looped-bfs", 4)),
        *(("zb-h1", 3), ("zb-h2", 3), ("zb-v", 4)),
    ],
)
@given(stages=st.lists(STAGES, min_size=4, max_size=4), way_s=FEW_US, own_s=FEW_US)
def test_a_fitted_simulation_repeats_the_steps(
    name: str, num_stages: int, stages: list[StageCost], way_s: float, own_s: float
) -> None:
    """Whatever ops, lanes and links cost, and whatever was believed before."""
    num_devices = num_stages // 2 if num_stages == 4 else num_stages
    schedule = make_schedule(name, num_devices=num_devices, num_microbatches=8)
    true = Costs(
        tuple(stages[:num_stages]), link=Link(way_s), handling=Link(own_s), op_s=1e-5
    )
    believed = Costs(
        tuple(replace(cost, forward_s=1.0) for cost in true.stages),
        link=Link(1e-3),
        handling=Link(1e-3),
    )
    step = simulate(schedule, true)
    found = fit(believed, [step, step])

    # If hardly any op waits, hardly any gap shows how long messages take.
    off = 2e-3 if name.startswith("zb-") else 1e-6
    assert simulate(schedule, found).makespan_s == pytest.approx(step.makespan_s, off)
    assert found.handling.latency_s == pytest.approx(own_s, abs=1e-9)
    num_halves = 2 if name.startswith("zb-") else 1
    for cost, one in zip(found.stages, true.stages, strict=True):
        backward_s = one.input_grad_s + one.weight_grad_s + num_halves * true.op_s
        assert cost.forward_s == pytest.approx(one.forward_s + true.op_s)
        assert cost.input_grad_s + cost.weight_grad_s == pytest.approx(backward_s)


def test_i_and_w_are_fitted_from_an_order_that_splits_backwards() -> None:
    """Otherwise a backward divides as it did before."""
    whole = make_schedule("1f1b", num_devices=2, num_microbatches=4)
    true = Costs((StageCost(1.0, 2.0, 1.0),) * 2)
    believed = Costs((StageCost(1.0, 1.0, 3.0),) * 2)

    (cost, _) = fit(believed, [simulate(whole, true)]).stages
    assert (cost.input_grad_s, cost.weight_grad_s) == (0.75, 2.25)


def test_fitted_i_and_w_equal_the_true_ones() -> None:
    """Whatever was believed of them."""
    apart = make_schedule("zb-h1", num_devices=2, num_microbatches=4)
    true = Costs((StageCost(1.0, 2.0, 1.0), StageCost(1.0, 1.0, 2.0)))
    believed = Costs((StageCost(1.0, 1.0, 3.0),) * 2)

    found = fit(believed, [simulate(apart, true)]).stages
    halves_s = [(cost.input_grad_s, cost.weight_grad_s) for cost in found]
    assert halves_s == [(2.0, 1.0), (1.0, 2.0)]


def test_an_order_of_b_i_and_w_shows_what_splitting_costs() -> None:
    """A simulation with the fitted costs takes as long as the step, op by op."""
    schedule = Schedule.parse("d0  0F0 0F1 0F2 0B0 0I1 0W1 0I2 0W2 0U")
    costs = Costs((StageCost(1.0, 1.0, 1.0),))
    starts = [np.array([0, 1, 2, 3, 6, 8, 10, 12, 14], float)]
    ends = [np.array([1, 2, 3, 6, 8, 10, 12, 14, 14], float)]
    step = observed(schedule, costs, starts, ends, Origin.MEASURED)

    found = fit(costs, [step])
    (cost,) = found.stages
    assert cost.input_grad_s == cost.weight_grad_s == pytest.approx(1.5)
    assert cost.split_s == pytest.approx(1.0)
    assert np.allclose(simulate(schedule, found).end_s[0], ends[0])


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_the_ratio_of_split_and_whole_backwards_stays(
    name: str,
) -> None:
    """If only B, or only I and W, were measured, the ratio between them stays."""
    schedule = make_schedule(name, num_devices=2, num_microbatches=4)
    believed = Costs((StageCost(1.0, 2.0, 1.0, split_s=0.6),) * 2)
    true = Costs((StageCost(1.0, 4.0, 2.0, split_s=1.2),) * 2)

    for cost in fit(believed, [simulate(schedule, true)]).stages:
        assert cost.input_grad_s == pytest.approx(4.0)
        assert cost.weight_grad_s == pytest.approx(2.0)
        assert cost.split_s == pytest.approx(1.2)


def test_a_step_of_one_device_says_nothing_about_messages() -> None:
    """Costs of ops that were not measured stay."""
    alone = make_schedule("gpipe", num_devices=1, num_microbatches=4)
    true = Costs((StageCost(1.0, 2.0, 1.0),))
    believed = replace(true, link=Link(7.0), handling=Link(5.0))

    found = fit(believed, [simulate(alone, true)])
    assert (found.link, found.handling) == (Link(7.0), Link(5.0))


def test_only_counted_ops_show_how_long_ops_take() -> None:
    """Those before and behind the body of an order may be faster."""
    schedule = make_schedule("1f1b", num_devices=1, num_microbatches=4)
    believed = Costs((StageCost(1.0, 1.0, 1.0),))
    lasts_s = np.array([9.0, 9.0, 2.0, 4.0, 2.0, 4.0, 9.0, 9.0, 0.0])
    end_s = np.cumsum(lasts_s)
    step = observed(schedule, believed, [end_s - lasts_s], [end_s], Origin.MEASURED)

    (cost,) = fit(believed, [step], [slice(2, 6)]).stages
    assert cost.forward_s == 2.0
    assert cost.input_grad_s + cost.weight_grad_s == 4.0


def test_a_first_op_shows_how_long_messages_take_at_most() -> None:
    """Past bug: the latency was 0.3 % off where all other messages arrive in time."""
    schedule = make_schedule("zb-h2", num_devices=3, num_microbatches=8)
    stages = (
        StageCost(3.368e-3, 4e-3, 2e-3),
        StageCost(4e-3, 1e-3, 4e-3),
        StageCost(1e-3, 4e-3, 4e-3),
    )
    way_s = 60e-6
    true = Costs(stages, link=Link(way_s), handling=Link(way_s), op_s=1e-5)
    step = simulate(schedule, true)

    found = fit(replace(true, link=Link(1e-3)), [step])
    assert found.link.latency_s == pytest.approx(way_s)
    assert simulate(schedule, found).makespan_s == pytest.approx(step.makespan_s)
