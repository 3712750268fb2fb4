"""Changed costs: what a slower device or another link costs, in closed form."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hocket.core.costs import Costs, Link, StageCost, with_bandwidth, with_slow_device
from hocket.core.formats.costs_json import from_json, to_json
from hocket.core.simulate import simulate
from hocket.errors import CostsError, ParseError
from hocket.schedules import make_schedule


def test_a_slow_device_sets_the_pace() -> None:
    """Each microbatch but those of warm-up and drain takes as long as on it."""
    schedule = make_schedule("gpipe", num_devices=3, num_microbatches=8)
    costs, program = Costs.uniform(), schedule.program
    before_s = simulate(schedule, costs).makespan_s
    slow = simulate(schedule, with_slow_device(costs, program, 1, 1.5))

    assert slow.makespan_s == pytest.approx(before_s + 8 * 0.5 * 3.0)
    same = with_slow_device(costs, program, 1, 1.0)
    assert simulate(schedule, same).makespan_s == before_s


def test_another_bandwidth_is_of_one_link_both_ways() -> None:
    """Latency stays, and other links do."""
    schedule = make_schedule("gpipe", num_devices=3, num_microbatches=1)
    stage = StageCost(forward_s=1.0, output_bytes=100, input_grad_bytes=100)
    costs = Costs((stage,) * 3, link=Link(0.5, 100.0))
    faster = with_bandwidth(costs, schedule.program, (1, 0), 400.0)

    assert faster.link_between(0, 1) == faster.link_between(1, 0) == Link(0.5, 400.0)
    assert faster.link_between(1, 2) == costs.link
    saved_s = simulate(schedule, costs).makespan_s
    saved_s -= simulate(schedule, faster).makespan_s
    assert saved_s == pytest.approx(2 * 0.75)


@pytest.mark.parametrize("device", [-1, 2])
def test_there_is_no_such_device(device: int) -> None:
    """The error says which there are."""
    program = make_schedule("1f1b", num_devices=2, num_microbatches=2).program
    with pytest.raises(CostsError, match="devices 0 to 1"):
        with_slow_device(Costs.uniform(), program, device, 2.0)
    with pytest.raises(CostsError, match="devices 0 to 1"):
        with_bandwidth(Costs.uniform(), program, (0, device), 1.0)
    with pytest.raises(CostsError, match="not above 0"):
        with_slow_device(Costs.uniform(), program, 0, 0.0)


def test_costs_are_read_back_as_they_were() -> None:
    """With infinite links, named links, and every number of a stage."""
    costs = replace(
        Costs((StageCost(forward_s=0.1, weight_bytes=7, recomputes=True),) * 2),
        links=((0, 1, Link(0.25, 3.5, "card")),),
        reduce_link=Link(1e-6, 1e9),
        jitter=0.05,
        accumulates=True,
    )
    assert from_json(to_json(costs)) == costs


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hocket_costs": 2}, "no costs"),
        ({"stages": [{"forward_s": -1}]}, "forward_s is -1"),
        ({"stages": [{"speed": 1}]}, "no 'speed'"),
        ({"jitter": 5.0}, "jitter is 5"),
        ({"links": None}, "run/costs.json"),
    ],
)
def test_what_cannot_be_read_is_named(change: dict[str, object], words: str) -> None:
    """With the file's name."""
    document = json.loads(to_json(Costs((StageCost(),)))) | change
    with pytest.raises(ParseError, match=words) as error:
        from_json(json.dumps(document), path="run/costs.json")
    assert "run/costs.json" in str(error.value)
