"""The critical path is a chain without gaps, as long as the timeline."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.core.costs import Costs, Link
from hocket.core.simulate import simulate
from hocket.core.timelines.causality import PathKind, critical_path
from hocket.core.timelines.timeline import DataWait
from hocket.schedules import SCHEDULES, make_schedule
from tests.strategies import shapes


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@given(data=st.data())
@settings(max_examples=10)
def test_the_path_is_as_long_as_the_timeline(name: str, data: st.DataObject) -> None:
    """Whatever the schedule: segments follow each other from begin to end.

    A wait for a batch comes before them all.
    """
    costs = replace(
        Costs.uniform(message_s=0.3, update_s=0.2, weight_grad_s=0.7),
        reduce_link=Link(latency_s=0.4),
        handling=Link(latency_s=0.01),
        jitter=0.1,
    )
    timeline = simulate(SCHEDULES[name].make(data.draw(shapes(name))), costs)
    late = DataWait(timeline.schedule.lanes[0].device, -0.5, 0.0)
    timeline = replace(timeline, data_waits=(late,))
    path = critical_path(timeline)

    assert path.segments[0].start_s == pytest.approx(timeline.begin_s)
    assert sum(path.seconds.values()) == pytest.approx(timeline.makespan_s)
    for a, b in pairwise(path.segments):
        assert a.end_s == pytest.approx(b.start_s)


@given(p=st.integers(1, 6), m=st.integers(1, 8))
def test_gpipes_path_crosses_every_link_once_each_way(p: int, m: int) -> None:
    """(m + p - 1) forwards and backwards, and 2 (p - 1) messages."""
    schedule = make_schedule("gpipe", num_devices=p, num_microbatches=m)
    path = critical_path(simulate(schedule, Costs.uniform(message_s=0.25)))

    assert path.seconds[PathKind.WORK] == pytest.approx(3.0 * (m + p - 1))
    assert path.seconds[PathKind.MESSAGE] == pytest.approx(0.25 * 2 * (p - 1))
    there = {(a, a + 1) for a in range(p - 1)}
    assert path.link_s.keys() == there | {(b, a) for a, b in there}


def test_a_slow_stage_is_on_the_path_all_the_time() -> None:
    """The path stays on the slowest device while the pipeline is full."""
    costs = Costs.uniform().of(
        make_schedule("1f1b", num_devices=3, num_microbatches=1).program
    )
    slow = (costs[0], replace(costs[1], forward_s=3.0), costs[2])
    schedule = make_schedule("1f1b", num_devices=3, num_microbatches=10)
    path = critical_path(simulate(schedule, Costs(slow)))
    on_slow_s = sum(part.seconds for part in path.segments if part.op.stage == 1)

    assert on_slow_s >= 9 * 5.0
