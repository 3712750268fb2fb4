"""Each stage is whole as long as the memory of its device allows."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Final

import pytest

from hocket.core.costs import Costs, StageCost
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.errors import FitError
from hocket.passes.add_gathers import KEEPS, Keep, add_gathers
from hocket.planner.gathers import choose_gathers
from hocket.schedules import make_schedule

EACH: Final = StageCost(
    forward_s=2.0,
    input_grad_s=2.0,
    weight_grad_s=2.0,
    activation_bytes=1,
    weight_bytes=10,
    unshard_s=1.0,
)


def costs_of(whole_bytes: list[int]) -> Costs:
    """Stages that differ in the bytes that they gather."""
    return Costs(tuple(replace(EACH, whole_bytes=num) for num in whole_bytes))


def order(num_stages_per_device: int = 3, num_shards: int = 2) -> Schedule:
    """Two devices with some stages each."""
    return make_schedule(
        "interleaved-1f1b",
        num_devices=2,
        num_microbatches=4,
        stages_per_device=num_stages_per_device,
        num_shards=num_shards,
    )


def predicted(schedule: Schedule, costs: Costs, keeps: dict[int, Keep]) -> list[float]:
    """The peak of each device, and the makespan."""
    timeline = simulate(add_gathers(schedule, keeps), costs)
    return [*(curve.peak for curve in timeline.memory), timeline.makespan_s]


def test_all_stay_whole_where_memory_allows() -> None:
    """And where nothing is sharded."""
    costs = costs_of([100] * 6)
    everything = dict.fromkeys(range(6), "step")

    assert choose_gathers(order(), costs, 10**6) == everything
    assert choose_gathers(order(num_shards=1), costs, 1) == everything


def test_only_the_stages_of_a_full_device_are_released() -> None:
    """Device 1 has stages 1, 3 and 5, and as many bytes too many as one of them has."""
    schedule, costs = order(), costs_of([10, 50, 10, 50, 10, 50])
    whole = predicted(schedule, costs, dict.fromkeys(range(6), "step"))

    keeps = choose_gathers(schedule, costs, int(whole[1]) - 50)

    assert [keeps[stage] for stage in (0, 2, 4)] == ["step"] * 3
    assert {keeps[stage] for stage in (1, 3, 5)} != {"step"}
    assert predicted(schedule, costs, keeps)[1] <= whole[1] - 50


@pytest.mark.parametrize("whole_bytes", [[30, 30, 30, 30], [10, 40, 80, 20]])
def test_against_every_choice(whole_bytes: list[int]) -> None:
    """Where a choice fits, one is found; no stage of it could be whole for longer."""
    schedule, costs = order(2), costs_of(whole_bytes)
    choices = [dict(enumerate(keeps)) for keeps in product(KEEPS, repeat=4)]
    all_peaks = {max(predicted(schedule, costs, keeps)[:2]) for keeps in choices}
    for memory_bytes in sorted(map(int, all_peaks)):
        keeps = choose_gathers(schedule, costs, memory_bytes)
        assert max(predicted(schedule, costs, keeps)[:2]) <= memory_bytes
        for stage, keep in keeps.items():
            for longer in KEEPS[: KEEPS.index(keep)]:
                peaks = predicted(schedule, costs, {**keeps, stage: longer})[:2]
                assert max(peaks) > memory_bytes
    with pytest.raises(FitError):
        choose_gathers(schedule, costs, int(min(all_peaks)) - 1)


def test_what_never_fits_is_refused_with_numbers() -> None:
    """The least memory that works is a number to use."""
    schedule, costs = order(), costs_of([100] * 6)
    with pytest.raises(
        FitError, match="even where each op gathers its stage's weig"
    ) as e:
        choose_gathers(schedule, costs, 100)

    assert "weights 230 B" in str(e.value)
    keeps = choose_gathers(schedule, costs, e.value.needed_bytes)
    assert max(predicted(schedule, costs, keeps)[:2]) <= e.value.needed_bytes
