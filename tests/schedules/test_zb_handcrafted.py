"""ZB-H1 and ZB-H2: the closed forms of the paper, and what the table does not say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.core.check import check
from hocket.core.costs import Costs, StageCost
from hocket.core.op import Op
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.core.timelines.timeline import Timeline
from hocket.errors import ScheduleError
from hocket.schedules import make_schedule

ACTIVATION, HELD = 100, 7
LEADS = {"zb-h1": 1, "zb-h2": 2}


def timeline_of(
    name: str, p: int, m: int, share: StageCost, num_steps: int = 1
) -> Timeline:
    """One of the two, simulated on equal devices."""
    schedule = make_schedule(
        name, num_devices=p, num_microbatches=m, num_steps=num_steps
    )
    return simulate(schedule, Costs((share,), is_device_share=True))


@st.composite
def usual_shares(draw: st.DrawFn) -> StageCost:
    """Times as the paper has them: W is no longer than F and I."""
    weight = draw(st.integers(1, 5))
    return StageCost(
        forward_s=float(weight + draw(st.integers(0, 3))),
        input_grad_s=float(weight + draw(st.integers(0, 3))),
        weight_grad_s=float(weight),
        activation_bytes=ACTIVATION,
        weight_grad_held_bytes=HELD,
    )


@given(data=st.data(), p=st.integers(2, 8), share=usual_shares())
def test_h1_has_the_papers_bubble(
    data: st.DataObject, p: int, share: StageCost
) -> None:
    """(p - 1)(F + I - W), from p microbatches on."""
    m = data.draw(st.integers(p, 4 * p))
    f, i, w = share.forward_s, share.input_grad_s, share.weight_grad_s
    makespan_s = timeline_of("zb-h1", p, m, share).makespan_s
    assert makespan_s == m * (f + i + w) + (p - 1) * (f + i - w)


@given(data=st.data(), p=st.integers(2, 8), share=usual_shares())
def test_h2_has_the_papers_bubble_between_steps(
    data: st.DataObject, p: int, share: StageCost
) -> None:
    """(p - 1)(F + I - 2W), or none where that is negative, from 2p - 1 on."""
    m = data.draw(st.integers(2 * p - 1, 4 * p))
    f, i, w = share.forward_s, share.input_grad_s, share.weight_grad_s
    one, two = (
        timeline_of("zb-h2", p, m, share, num_steps).makespan_s for num_steps in (1, 2)
    )
    assert two - one == m * (f + i + w) + (p - 1) * max(0.0, f + i - 2 * w)


@pytest.mark.parametrize("name", sorted(LEADS))
@given(data=st.data(), p=st.integers(2, 8), share=usual_shares())
def test_memory_is_the_papers(
    name: str, data: st.DataObject, p: int, share: StageCost
) -> None:
    """Device `d` holds `p - d` and `d` of H1, `2 * (p - d) - 1` and `2 * d` of H2.

    What W needs counts apart: `d` microbatches wait for their W while `p - d` wait for
    their I. From F to W, all devices hold as many: `p` of H1, `2 * p - 1` of H2.
    """
    lead = LEADS[name]
    m = data.draw(st.integers(lead * (p - 1) + 1, 4 * p))
    timeline = timeline_of(name, p, m, share)
    for device in range(p):
        whole = lead * (p - 1 - device) + 1
        expected = whole * ACTIVATION + lead * device * HELD
        assert timeline.peak_activations(device) == whole
        assert timeline.peak_microbatches(device) == lead * (p - 1) + 1
        if m > lead * (p - 1) + 1:  # or the last W waits while nothing is left to do
            assert timeline.peak_bytes(device) == expected
        assert timeline.peak_bytes(device) <= expected


@given(p=st.integers(1, 8), m=st.integers(1, 16), share=usual_shares())
def test_h1_is_never_slower_than_1f1b(p: int, m: int, share: StageCost) -> None:
    """ZB-H1 holds as many activations as 1F1B, also of few microbatches."""
    plain = timeline_of("1f1b", p, m, share)
    split = timeline_of("zb-h1", p, m, share)
    assert split.makespan_s <= plain.makespan_s
    for device in range(p):
        assert split.peak_activations(device) == plain.peak_activations(device)


def test_a_third_of_the_bubble_of_1f1b() -> None:
    """The paper's summary: F, I and W equal, as many microbatches as there may be."""
    share = StageCost(1.0, 1.0, 1.0)
    bubbles = [
        timeline_of(name, 4, 8, share).makespan_s - 8 * 3 for name in ("1f1b", "zb-h1")
    ]
    assert bubbles == [9.0, 3.0]


def changed(schedule: Schedule, device: int, ops: tuple[Op, ...]) -> Schedule:
    """The schedule with another lane."""
    lanes = list(schedule.lanes)
    lanes[device] = replace(lanes[device], ops=ops)
    return replace(schedule, lanes=tuple(lanes))


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-auto"])
def test_a_dropped_or_doubled_weight_gradient_is_named(name: str) -> None:
    """A dropped W would be a wrong model, which no timing shows."""
    schedule = make_schedule(name, num_devices=3, num_microbatches=6)
    weight = Op.parse("1W3")
    ops = schedule.lanes[1].ops
    without = tuple(op for op in ops if op != weight)
    with pytest.raises(ScheduleError, match="1W3 is missing, but 1I3 is there"):
        check(changed(schedule, 1, without))
    with pytest.raises(ScheduleError, match="1W3 is there 2 times"):
        check(changed(schedule, 1, (*ops[:-1], weight, ops[-1])))
