"""The simulator against the papers' closed forms, and small cases by hand."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hocket.core.costs import MAX_JITTER, Costs, Link, StageCost
from hocket.core.op import Op
from hocket.core.program import Program
from hocket.core.schedule import Lane, Schedule
from hocket.core.simulate import simulate
from hocket.errors import CostsError, DeadlockError, ScheduleError
from hocket.schedules import make_schedule
from tests.core.flush_free import two_buffered_weights
from tests.core.support.spans import spans

devices = st.integers(1, 5)
microbatches = st.integers(1, 10)
whole_seconds = st.integers(1, 9).map(float)


@given(
    name=st.sampled_from(["gpipe", "1f1b"]),
    p=devices,
    m=microbatches,
    f=whole_seconds,
    i=whole_seconds,
    w=whole_seconds,
)
def test_flushed_pipelines_take_m_plus_p_minus_1_slots(
    name: str, p: int, m: int, f: float, i: float, w: float
) -> None:
    """Narayanan et al., arXiv:2104.04473, section 2.2.1: GPipe and 1F1B alike."""
    schedule = make_schedule(name, num_devices=p, num_microbatches=m)
    costs = Costs.uniform(forward_s=f, input_grad_s=i, weight_grad_s=w)
    timeline = simulate(schedule, costs)

    assert timeline.makespan_s == (m + p - 1) * (f + i + w)
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


@given(p=devices, m=microbatches, c=st.integers(0, 9))
def test_gpipe_pays_each_delay_once_there_and_once_back(p: int, m: int, c: int) -> None:
    """Messages hide behind the next microbatch, but for those of the fill and drain."""
    schedule = make_schedule("gpipe", num_devices=p, num_microbatches=m)
    timeline = simulate(schedule, Costs.uniform(message_s=float(c)))

    assert timeline.makespan_s == (m + p - 1) * 3 + 2 * c * (p - 1)


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "idle_s", "num_messages"),
    [
        ("gpipe", 4, 16, 1, 9.0, 6),
        ("gpipe", 8, 24, 1, 21.0, 14),
        ("interleaved-1f1b", 4, 16, 2, 4.5, 14),
        ("interleaved-1f1b", 8, 24, 2, 10.5, 30),
        ("interleaved-1f1b", 4, 16, 4, 2.25, 30),
        ("interleaved-1f1b", 8, 24, 4, 5.25, 62),
        ("looped-bfs", 4, 16, 2, 4.5, 14),
    ],
)
def test_orders_of_torch_idle_as_long_as_measured(
    name: str, p: int, m: int, v: int, idle_s: float, num_messages: int
) -> None:
    """Idle is `(p - 1) (F + B) / v`; a microbatch crosses `2 (v p - 1)` borders."""
    schedule = make_schedule(
        name, num_devices=p, num_microbatches=m, stages_per_device=v
    )
    timeline = simulate(schedule, Costs.uniform())

    assert timeline.makespan_s - 3 * m == idle_s == (p - 1) * 3 / v
    assert timeline.traffic.lane.size == num_messages * m


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("c", [0.0, 0.1, 0.25])
def test_flush_free_order_loses_only_what_messages_cost(p: int, c: float) -> None:
    """A slot of `F + B` grows by `2 c (p - 1) / p`, the delays there and back.

    With the tight warm-up; without delays the steady bubble is 0.
    """
    schedule = two_buffered_weights(p, num_microbatches=p, num_steps=12)
    costs = Costs.uniform(message_s=c)
    slot_s = 3.0

    lost_s = 2 * c * (p - 1) / p
    expected = lost_s / (slot_s + lost_s)
    assert simulate(schedule, costs).steady_bubble_fraction == pytest.approx(expected)


def test_prologue_and_epilogue_cost_a_flush_free_order_one_bubble() -> None:
    """Its fill and drain are `(p - 1) (F + B)` once, however many steps there are."""
    for num_steps in (2, 5):
        schedule = two_buffered_weights(4, num_microbatches=4, num_steps=num_steps)
        timeline = simulate(schedule, Costs.uniform())

        assert timeline.makespan_s == (4 * num_steps + 3) * 3


def test_reductions_overlap_and_follow_each_other() -> None:
    """Two stages on one device, two replicas; by hand.

    d0  1B 0-2, 1R starts, 0B 2-4, 0R starts, 1U waits for 1R, 0U for 0R
        1R: ring of 2, 2 messages of latency 1 and 3 bytes: 8 s, so 2-10
        0R: may not begin before 10, ends at 18
    """
    text = "d0  0F0 1F0 1B0 1R 0B0 0R 1U 0U"
    schedule = Schedule.parse(f"{HEADER}{text}")
    cost = StageCost(0.0, 1.0, 1.0, update_s=1.0, gradient_bytes=6)
    timeline = simulate(schedule, Costs((cost, cost), reduce_link=Link(1.0, 1.0)))

    assert spans(timeline) == {
        "0F0": (0, 0),
        "1F0": (0, 0),
        "1B0": (0, 2),
        "1R": (2, 10),
        "0B0": (2, 4),
        "0R": (4, 18),
        "1U": (10, 11),
        "0U": (18, 19),
    }
    assert [
        (str(t.op), t.from_device, t.to_device, t.start_s, t.end_s, t.num_bytes)
        for t in timeline.transfers
    ] == [("1R", 0, 0, 2.0, 10.0, 6), ("0R", 0, 0, 10.0, 18.0, 6)]


HEADER = """
replicas 2
net model microbatches=1
stage 0 net=model device=0
stage 1 net=model device=0
flow 0>1
"""


def test_one_replica_reduces_in_no_time() -> None:
    """A ring of one sends nothing."""
    schedule = Schedule.parse(
        f"{HEADER}d0  0F0 1F0 1B0 1R 0B0 0R 1U 0U".replace("replicas 2", "")
    )
    cost = StageCost(gradient_bytes=6)

    assert (
        simulate(schedule, Costs((cost, cost), reduce_link=Link(1.0, 1.0))).makespan_s
        == 0
    )


@given(op_s=st.integers(0, 5).map(float))
def test_host_time_is_added_to_each_op_that_works(op_s: float) -> None:
    """Per-op overhead does not apply to reductions, which are asynchronous."""
    schedule = Schedule.parse(f"{HEADER}d0  0F0 1F0 1B0 1R 0B0 0R 1U 0U")
    cost = StageCost(1.0, 1.0, 1.0, update_s=1.0)

    assert simulate(schedule, Costs((cost, cost), op_s=op_s)).makespan_s == 8 + 6 * op_s


@given(jitter=st.floats(0, MAX_JITTER), num_microbatches=st.integers(1, 9))
def test_jitter_changes_no_lanes_own_work(jitter: float, num_microbatches: int) -> None:
    """A stage's ops take the mean together: a device alone is as fast as without."""
    schedule = make_schedule("gpipe", num_devices=1, num_microbatches=num_microbatches)
    cost = StageCost(1.0, 1.0, 1.0, update_s=1.0)

    without = simulate(schedule, Costs((cost,)))
    varied = simulate(schedule, Costs((cost,), jitter=jitter))

    assert varied.makespan_s == pytest.approx(without.makespan_s)


@given(jitter=st.floats(0.01, MAX_JITTER), name=st.sampled_from(["gpipe", "1f1b"]))
def test_lanes_that_wait_for_each_other_lose_by_jitter(
    jitter: float, name: str
) -> None:
    """Lanes wait for late ops, and early ops gain no time."""
    schedule = make_schedule(name, num_devices=2, num_microbatches=16)
    cost = StageCost(1.0, 1.0, 1.0)

    without = simulate(schedule, Costs((cost, cost)))
    varied = simulate(schedule, Costs((cost, cost), jitter=jitter))

    assert varied.makespan_s > without.makespan_s
    again = simulate(schedule, Costs((cost, cost), jitter=jitter))
    assert varied.makespan_s == again.makespan_s


def test_whole_batch_loss_waits_for_every_forward() -> None:
    """L begins when the last of both nets' outputs is there; B waits for L."""
    schedule = Schedule.parse(
        """
        net teacher microbatches=2
        net student microbatches=2 loss=batch
        stage 0 net=teacher device=0 trainable=no
        stage 1 net=student device=1
        flow 0>1
        d0  0F0 0F1
        d1  1F0 1F1 1L 1B0 1B1 1U
        """
    )
    teacher = StageCost(3.0)
    student = StageCost(1.0, 1.0, 1.0, loss_s=5.0)
    timeline = simulate(schedule, Costs((teacher, student), link=Link(0.5)))

    found = spans(timeline)
    assert found["1F1"] == (1, 2)
    assert found["1L"] == (6.5, 11.5)
    assert found["1B0"] == (11.5, 13.5)


def test_deadlock_names_where_each_lane_stands() -> None:
    """The error names each lane's op, and the value that it waits for."""
    with pytest.raises(DeadlockError) as caught:
        simulate(Schedule.parse("d0  0F0 0B0 0F1 0B1\nd1  1F1 1B1 1F0 1B0"), UNIFORM)

    assert caught.value.faults == (
        "no lane can move, each waits for another:",
        "  d0 stands at 0B0 and needs dx[stage 1, microbatch 0] of 1B0 on device 1",
        "  d1 stands at 1F1 and needs y[stage 0, microbatch 1] of 0F1 on device 0",
    )


UNIFORM = Costs.uniform()


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        # A later op of its lane makes what it needs; no op makes it.
        ("0B0 0F0 0U", r"0B0 and needs y\[stage 0, micro"),
        ("0F0 0F1 0B0 0U", r"0U and needs dw\[stage 0, microbatch 1\]"),
    ],
)
def test_a_value_that_never_comes_is_a_deadlock(ops: str, message: str) -> None:
    """The checker says it better; the simulator at least does not go on."""
    with pytest.raises(DeadlockError, match=message):
        simulate(Schedule.parse(f"d0  {ops}"), UNIFORM)


def test_costs_that_cannot_be_are_refused() -> None:
    """Of another program; or jitter that gives an op less than no time."""
    with pytest.raises(CostsError, match="costs of 3 stages do not fit"):
        simulate(Schedule.parse("d0  0F0\nd1  1F0"), Costs((StageCost(),) * 3))
    with pytest.raises(CostsError, match=r"jitter is 0\.5, not between 0 and 0\.3"):
        Costs((StageCost(),), jitter=0.5)


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ("0F0 0B0 0F0", r"two ops make y\[stage 0, microbatch 0\]"),
        ("0F0 0B0 7F0", "7F0 on lane d0 is no op of this program"),
        ("0F0 0B0 0F1", "0F1 on lane d0 is no op of this program"),
        ("0F0 0B0 0F0@1", "0F0@1 on lane d0 is no op of this program"),
        ("0F0 0B0 1F0", "1F0 on lane d0 is not on the device of its stage"),
        ("0F0 0SEND_F0>1", "0SEND_F0>1 on lane d0 has nothing at its other end"),
        ("0F0 0RECV_B0<1", "0RECV_B0<1 on lane d0 has nothing at its other end"),
        ("0F0 0SEND_F0>9", "0SEND_F0>9 on lane d0 is no op of this program"),
    ],
)
def test_ops_that_cannot_be_are_refused(ops: str, message: str) -> None:
    """Errors name the op and its lane, and point to the checker."""
    lane = Lane(0, 0, tuple(Op.parse(word) for word in ops.split()))
    schedule = Schedule(Program.chain([0, 1], 1), (lane, Lane(1, 0, ())))

    with pytest.raises(ScheduleError, match=f"{message}.*`check` finds all"):
        simulate(schedule, UNIFORM)


@given(p=devices, m=microbatches, scale=st.integers(2, 5))
def test_time_has_no_unit(p: int, m: int, scale: int) -> None:
    """If everything takes `scale` times as long, everything happens so much later."""
    assume(p > 1)
    schedule = make_schedule("1f1b", num_devices=p, num_microbatches=m)
    once, more = (
        simulate(
            schedule,
            Costs.uniform(
                forward_s=1.0 * k,
                input_grad_s=2.0 * k,
                weight_grad_s=1.0 * k,
                message_s=0.5 * k,
            ),
        )
        for k in (1, scale)
    )

    assert more.makespan_s == once.makespan_s * scale
    assert more.bubble_fraction == pytest.approx(once.bubble_fraction)
