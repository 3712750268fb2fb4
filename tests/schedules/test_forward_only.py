"""Evaluation on the stages of any training schedule."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.core.check import check
from hocket.core.costs import Costs
from hocket.core.op import Kind
from hocket.core.simulate import simulate
from hocket.errors import ShapeError
from hocket.schedules import SCHEDULES, make_schedule


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_takes_the_placement_of_every_schedule(name: str) -> None:
    """Stages stay where they are trained, so that evaluation moves no weight."""
    num_microbatches = 1 if name == "pipedream" else 8
    num_devices = 1 if SCHEDULES[name].is_data_parallel else 4
    trained = make_schedule(
        name, num_devices=num_devices, num_microbatches=num_microbatches
    ).program
    devices = [stage.device for stage in trained.stages]
    schedule = make_schedule(
        "forward-only", num_devices=num_devices, num_microbatches=3, devices=devices
    )
    check(schedule)
    assert [stage.device for stage in schedule.program.stages] == devices
    assert not any(stage.trainable for stage in schedule.program.stages)


@given(
    others=st.lists(st.integers(0, 2), max_size=4),
    order=st.randoms(use_true_random=False),
    num_steps=st.integers(1, 3),
)
def test_any_placement_comes_to_its_end(
    others: list[int], order: Random, num_steps: int
) -> None:
    """Whatever devices the stages are on, with any number of them on each."""
    devices = [0, 1, 2, *others]
    order.shuffle(devices)
    schedule = make_schedule(
        "forward-only",
        num_devices=3,
        num_microbatches=2,
        num_steps=num_steps,
        devices=devices,
    )
    check(schedule)
    assert {op.kind for lane in schedule.lanes for op in lane.ops} == {Kind.FORWARD}


@pytest.mark.parametrize("devices", [[0, 0], [0, 1, 3], [0, 2]])
def test_refuses_a_placement_that_leaves_devices_out(devices: list[int]) -> None:
    """The error names the devices given and the number of devices."""
    with pytest.raises(ShapeError) as caught:
        make_schedule(
            "forward-only", num_devices=2, num_microbatches=2, devices=devices
        )
    assert f"devices={devices}" in str(caught.value)
    assert "num_devices=2" in str(caught.value)


def test_batches_follow_each_other_without_a_gap() -> None:
    """The pipeline fills once: a hundred batches cost what their forwards do."""
    schedule = make_schedule(
        "forward-only", num_devices=4, num_microbatches=4, num_steps=100
    )
    timeline = simulate(schedule, Costs.uniform(forward_s=1.0))
    assert timeline.makespan_s == pytest.approx(100 * 4 + (4 - 1))


def test_keeps_no_activations() -> None:
    """One microbatch at a time, in one of a device's stages."""
    schedule = make_schedule(
        "forward-only", num_devices=2, num_microbatches=6, stages_per_device=2
    )
    timeline = simulate(schedule, Costs.uniform())
    assert timeline.peak_activations(device=0) == pytest.approx(1 / 2)
