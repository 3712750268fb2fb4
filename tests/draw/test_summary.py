"""The numbers that stand beside every picture."""

from __future__ import annotations

import pytest

from hocket.core.costs import Costs
from hocket.core.op import Kind
from hocket.core.simulate import simulate
from hocket.core.timelines.memory import MemoryCurve
from hocket.draw.layout import merged_changes
from hocket.draw.summary import (
    knows_bytes,
    memory_curves,
    peak_bytes,
    sent_bytes,
    step_ends,
)
from tests.core.flush_free import two_buffered_weights
from tests.draw.timelines import REAL, measured, simulated


def test_numbers_are_those_of_the_timeline() -> None:
    """A summary reads its numbers off the timeline."""
    timeline = simulated("1f1b", 3, 4, num_steps=2, num_replicas=2, costs=REAL)

    assert timeline.step_s == timeline.makespan_s / 2
    assert peak_bytes(timeline) == [timeline.peak_bytes(d) for d in range(3)]
    # Four borders and directions, four microbatches, two steps; no reductions.
    assert sent_bytes(timeline) == 4 * 4 * 2 * REAL.output_bytes


def test_a_byte_for_each_microbatch_counts_microbatches() -> None:
    """`Costs.uniform` knows no sizes; a picture must not call its units bytes."""
    schedule = simulated("1f1b", 2, 4).schedule
    uniform = simulate(schedule, Costs.uniform())

    assert not knows_bytes(uniform)
    assert peak_bytes(uniform) == []
    assert [curve.peak for curve in memory_curves(uniform)] == [2.0, 1.0]


def test_steps_end_with_their_updates() -> None:
    """Steps end one after another, also where they overlap."""
    timeline = simulate(two_buffered_weights(3, 4, 5), Costs.uniform(update_s=0.5))
    for lane, ends in enumerate(step_ends(timeline)):
        ops = timeline.schedule.lanes[lane].ops
        updates = [i for i, op in enumerate(ops) if op.kind is Kind.UPDATE]
        assert ends.tolist() == timeline.end_s[lane][updates].tolist()
        assert (ends[1:] > ends[:-1]).all()


def test_a_curve_is_drawn_without_what_lasted_no_time() -> None:
    """Freed and taken at one instant is no dip; the end is the timeline's."""
    timeline = measured(simulated("gpipe", 1, 1))
    begin_s = timeline.begin_s
    instants = MemoryCurve.of_changes(
        timeline.start_s[0][[0, 0, 1]], timeline.start_s[0][[0, 0, 1]] * 0 + [3, -2, 1]
    )
    time_s, amount = merged_changes(instants, timeline)

    assert amount.tolist() == [1.0, 2.0, 2.0]
    assert time_s == pytest.approx([0.0, 1.05, timeline.makespan_s])
    assert begin_s > 0
