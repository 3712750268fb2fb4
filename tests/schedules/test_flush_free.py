"""What orders without a flush lose while they are full, and what they never lose."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hocket.core.check import check
from hocket.core.costs import Costs
from hocket.core.op import Kind
from hocket.core.simulate import simulate
from hocket.core.timelines.timeline import Timeline
from hocket.errors import ScheduleError, ShapeError
from hocket.schedules import SCHEDULES, Shape, make_schedule
from hocket.schedules.flush_free import flush_free

NUM_STEPS: Final = 12
TIGHT: Final = ("pipedream-2bw", "wpipe")

few = settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
times = st.integers(1, 12).map(lambda quarters: quarters / 4)
sizes = st.integers(2, 8)


def played(
    name: str, p: int, m: int, c: float, *, f: float = 1.0, b: float = 2.0
) -> Timeline:
    """Steps enough to be full, with messages that take `c`."""
    schedule = make_schedule(
        name, num_devices=p, num_microbatches=m, num_steps=NUM_STEPS
    )
    costs = Costs.uniform(
        forward_s=f, input_grad_s=b / 2, weight_grad_s=b / 2, message_s=c
    )
    return simulate(schedule, costs)


def tight_idle(p: int, c: float, slot_s: float) -> float:
    """Of each slot, the way of two messages, but for one device."""
    lost_s = 2 * c * (p - 1) / p
    return lost_s / (slot_s + lost_s)


@pytest.mark.parametrize("name", TIGHT)
@few
@given(p=sizes, visits=st.integers(1, 2), share=times, f=times, b=times)
def test_a_tight_warm_up_loses_what_messages_take(
    name: str, p: int, visits: int, share: float, f: float, b: float
) -> None:
    """`1 - s / (s + 2c (p - 1) / p)`, `s` being F and B of one stage.

    A device waits once in `p` microbatches: with other numbers than multiples of
    `p` a step has sometimes one wait more than the next.
    """
    c = share / 12 * f  # at most a quarter of a forward
    slot_s = (f + b) / SCHEDULES[name].stages_per_device
    idle = played(name, p, p * visits, c, f=f, b=b).steady_bubble_fraction
    assert idle == pytest.approx(tight_idle(p, c, slot_s))


@pytest.mark.parametrize(
    ("p", "c", "wpipe", "two_buffered"),
    [
        (4, 0.1, 0.091, 0.048),
        (4, 0.25, 0.200, 0.111),
        (8, 0.1, 0.104, 0.055),
        (8, 0.25, 0.226, 0.127),
        (4, 0.0, 0.0, 0.0),
        (8, 0.0, 0.0, 0.0),
    ],
)
def test_idle_shares_by_number(
    p: int, c: float, wpipe: float, two_buffered: float
) -> None:
    """Idle shares are the known ones for F = 1 and B = 2."""
    for name, share in (("wpipe", wpipe), ("pipedream-2bw", two_buffered)):
        idle = played(name, p, p, c).steady_bubble_fraction
        assert idle == pytest.approx(share, abs=5e-4)


@few
@given(p=st.integers(3, 8), more=st.integers(0, 6), f=times, b=times, share=times)
def test_the_longer_warm_up_hides_messages(
    p: int, more: int, f: float, b: float, share: float
) -> None:
    """Up to a quarter of `F + B`; a draw once found three devices, F = 1/4, B = 3/2."""
    assume((p, more) != (3, 0) or max(f, b) <= 5 * min(f, b))
    c = share / 3 * (f + b) / 4
    timeline = played("wpipe-overlapped", p, 2 * (p - 1) + more, c, f=f, b=b)
    assert timeline.steady_bubble_fraction == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("p", [4, 8])
def test_it_hides_no_more_than_that(p: int) -> None:
    """A hop of 0.74 costs nothing and one of 0.76 some time, for F + B = 3."""
    m = 2 * (p - 1)
    idle = [
        played("wpipe-overlapped", p, m, c).steady_bubble_fraction for c in (0.74, 0.76)
    ]
    assert idle[0] == pytest.approx(0.0, abs=1e-9)
    assert idle[1] > 0.001


@few
@given(p=st.integers(3, 8))
def test_with_fewer_microbatches_the_delays_would_mix(p: int) -> None:
    """`m = 2p - 3` with the longer warm-up: some forwards would come too early."""
    m = 2 * p - 3
    order = flush_free(
        Shape(p, m, stages_per_device=2, num_steps=4),
        [1] * p + [0] * p,
        lambda device: m + 2 * (p - 1 - device),
    )
    with pytest.raises(ScheduleError):
        check(order)


@pytest.mark.parametrize("name", [*TIGHT, "wpipe-overlapped"])
@few
@given(p=sizes, more=st.integers(0, 3))
def test_messages_are_counted(name: str, p: int, more: int) -> None:
    """A microbatch crosses `2 (v p - 1)` borders, there and back."""
    m = max(p, 2 * (p - 1)) + more
    num_borders = SCHEDULES[name].stages_per_device * p - 1
    timeline = played(name, p, m, 0.0)
    assert timeline.traffic.lane.size == 2 * num_borders * m * NUM_STEPS


def ends_of_gradients(timeline: Timeline) -> dict[tuple[int, int], float]:
    """When the last gradients of a delay and step are there."""
    stages = timeline.schedule.program.stages
    found: dict[tuple[int, int], float] = {}
    for lane, ends in zip(timeline.schedule.lanes, timeline.end_s, strict=True):
        for op, end_s in zip(lane.ops, ends.tolist(), strict=True):
            if op.kind is Kind.BACKWARD:
                key = stages[op.stage].delay, op.step
                found[key] = max(found.get(key, 0.0), end_s)
    return found


@pytest.mark.parametrize("name", [*TIGHT, "wpipe-overlapped"])
@few
@given(p=st.integers(2, 5), more=st.integers(0, 3), share=times, f=times, b=times)
def test_a_late_update_finds_all_gradients_of_its_group(
    name: str, p: int, more: int, share: float, f: float, b: float
) -> None:
    """Late updates find all gradients, with messages of up to a quarter of an F.

    The last steps are left out, since there is no other work behind them.
    """
    m = max(p, 2 * (p - 1)) + more
    schedule = make_schedule(
        name, num_devices=p, num_microbatches=m, num_steps=5, late_updates=True
    )
    check(schedule)
    costs = Costs.uniform(
        forward_s=f, input_grad_s=b / 2, weight_grad_s=b / 2, message_s=share / 12 * f
    )
    timeline = simulate(schedule, costs)
    known_s = ends_of_gradients(timeline)
    for lane, starts in zip(schedule.lanes, timeline.start_s, strict=True):
        for op, start_s in zip(lane.ops, starts.tolist(), strict=True):
            if op.kind is Kind.UPDATE and op.step < 3:
                delay = schedule.program.stages[op.stage].delay
                assert start_s >= known_s[delay, op.step] - 1e-9, op


@pytest.mark.parametrize("name", [*TIGHT, "wpipe-overlapped"])
@pytest.mark.parametrize("num_replicas", [1, 2])
@few
@given(p=st.integers(1, 6), more=st.integers(0, 3), num_steps=st.integers(1, 6))
def test_late_updates_change_nothing_else(
    name: str, num_replicas: int, p: int, more: int, num_steps: int
) -> None:
    """The same work in the same order; and the first device, which is last, as before.

    With replicas its updates wait, too.
    """
    m = max(p, 2 * (p - 1)) + more
    shape = {"num_microbatches": m, "num_steps": num_steps}
    soon, late = (
        make_schedule(
            name, num_devices=p, num_replicas=num_replicas, **shape, late_updates=late
        )
        for late in (False, True)
    )
    check(late)
    for one, other in zip(soon.lanes, late.lanes, strict=True):
        assert [op for op in one.ops if op.kind is not Kind.UPDATE] == [
            op for op in other.ops if op.kind is not Kind.UPDATE
        ]
    if num_replicas == 1:
        assert soon.lanes[0] == late.lanes[0]


def test_late_updates_by_eye() -> None:
    """The last device updates when the first is done; so it does with each step."""
    schedule = make_schedule(
        "pipedream-2bw",
        num_devices=2,
        num_microbatches=2,
        num_steps=3,
        late_updates=True,
    )
    first, last = str(schedule).splitlines()[-2:]
    assert first.endswith(":| 0F1@1 0B0@1 0F0@2 0B1@1 0U@1 0F1@2 0B0@2 0B1@2 0U@2")
    assert last == (
        "d1  1F0 1B0 |: 1F1 1B1 1F0@1 1B0@1 1U :| "
        "1F1@1 1B1@1 1F0@2 1B0@2 1U@1 1F1@2 1B1@2 1U@2"
    )


BLOCKS: Final = {"wpipe": 1, "wpipe-overlapped": 2}  # by how much warm-ups differ


@pytest.mark.parametrize("name", BLOCKS)
@few
@given(data=st.data(), p=st.integers(1, 6), num_replicas=st.integers(1, 2))
def test_any_number_of_blocks_keeps_delays_and_time(
    name: str, data: st.DataObject, p: int, num_replicas: int
) -> None:
    """Delays are 1 and 0 with two versions and one, as `check` proves; no idle time.

    Device `d` holds `(b + 1 + lead (p - 1 - d)) / 2`, `b` being the largest block.
    """
    lead = BLOCKS[name]
    least = max(p, lead * (p - 1))
    m = data.draw(st.integers(least, 4 * least + 3))
    num_blocks = data.draw(st.integers(1, m // least))
    schedule = make_schedule(
        name,
        num_devices=p,
        num_microbatches=m,
        num_steps=3,
        num_replicas=num_replicas,
        num_blocks=num_blocks,
        late_updates=data.draw(st.booleans()),
    )

    assert [stage.delay for stage in schedule.program.stages] == [1] * p + [0] * p
    assert check(schedule).num_versions == (2,) * p + (1,) * p
    timeline = simulate(schedule, Costs.uniform())
    assert timeline.makespan_s == 3 * m * 3.0 + (p - 1) * 3.0 / 2
    b = -(-m // num_blocks)
    for device in range(p):
        most = (b + 1 + lead * (p - 1 - device)) / 2
        assert timeline.peak_activations(device=device) == most


def test_blocks_of_eight_hold_eight_microbatches() -> None:
    """By number: 20 of 32 microbatches without blocks, 8 with four, in equal time."""
    one, four = played_in_blocks(0.0)

    assert [one.peak_activations(device=0), four.peak_activations(device=0)] == [20, 8]
    assert one.makespan_s == four.makespan_s


@pytest.mark.parametrize("c", [0.05, 0.25, 0.5])
def test_blocks_cost_time_only_while_the_pipeline_fills(c: float) -> None:
    """Steps take as long, with messages of any length; a run, less than 2 % more."""
    one, four = played_in_blocks(c)

    assert four.steady_bubble_fraction == pytest.approx(one.steady_bubble_fraction)
    assert 1 < four.makespan_s / one.makespan_s < 1.02


def played_in_blocks(c: float) -> tuple[Timeline, Timeline]:
    """A run of 8 devices with 32 microbatches, in one block and in four."""
    one, four = (
        make_schedule(
            "wpipe",
            num_devices=8,
            num_microbatches=32,
            num_steps=NUM_STEPS,
            num_blocks=num_blocks,
        )
        for num_blocks in (1, 4)
    )
    costs = Costs.uniform(message_s=c)
    return simulate(one, costs), simulate(four, costs)


@pytest.mark.parametrize(("name", "num_blocks"), [("wpipe", 3), ("wpipe", 0)])
def test_blocks_are_no_smaller_than_the_pipeline_is_long(
    name: str, num_blocks: int
) -> None:
    """The error says how many there may be."""
    with pytest.raises(ShapeError, match=r"takes 1 to 2 blocks, each of 4 .* or more"):
        make_schedule(name, num_devices=4, num_microbatches=11, num_blocks=num_blocks)
