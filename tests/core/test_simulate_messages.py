"""Messages by hand: bandwidth, latency, shared links, handling, explicit ops."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hocket.core.costs import Costs, Link, StageCost
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.core.timelines.timeline import Timeline
from hocket.errors import DeadlockError


def evaluation(devices: Sequence[int], flows: str, *lanes: str) -> Schedule:
    """One microbatch of stages that are not trained.

    Args:
        devices: of each stage.
        flows: from stage to stage, like `0>1 0>2`.
        lanes: as text.
    """
    stages = (
        f"stage {i} net=model device={d} trainable=no" for i, d in enumerate(devices)
    )
    lines = ["net model microbatches=1", *stages]
    lines += [f"flow {flow}" for flow in flows.split()]
    return Schedule.parse("\n".join([*lines, *lanes]))


# Two stages that make the input of a third, each on its own device.
TWO_INTO_ONE = evaluation([0, 1, 2], "0>2 1>2", "d0  0F0", "d1  1F0", "d2  2F0")


def starts(timeline: Timeline) -> dict[str, float]:
    """When each op began."""
    return {str(span.op): span.start_s for span in timeline.spans}


def sent(timeline: Timeline) -> list[tuple[str, int, float, float]]:
    """Each message: the op that made it, where it goes, and when."""
    return [(str(t.op), t.to_device, t.start_s, t.end_s) for t in timeline.transfers]


def test_messages_of_one_pair_follow_each_other_but_latencies_overlap() -> None:
    """Each occupies the link for 4 s and is usable 3 s after it has left it."""
    schedule = Schedule.parse("d0  0F0 0F1 0F2\nd1  1F0 1F1 1F2")
    cost = StageCost(1.0, output_bytes=8)
    timeline = simulate(schedule, Costs((cost, cost), link=Link(3.0, 2.0)))

    assert sent(timeline) == [
        ("0F0", 1, 1.0, 8.0),
        ("0F1", 1, 5.0, 12.0),
        ("0F2", 1, 9.0, 16.0),
    ]
    assert timeline.start_s[1].tolist() == [8.0, 12.0, 16.0]
    assert timeline.link_bytes() == {(0, 1): 24}


def test_pairs_without_a_name_have_their_own_links() -> None:
    """Both messages are on their way at once."""
    costs = Costs(
        (
            StageCost(1.0, output_bytes=4),
            StageCost(2.0, output_bytes=4),
            StageCost(1.0),
        ),
        link=Link(1.0, 1.0),
    )

    timeline = simulate(TWO_INTO_ONE, costs)

    assert sent(timeline) == [("0F0", 2, 1.0, 6.0), ("1F0", 2, 2.0, 7.0)]
    assert starts(timeline)["2F0"] == 7.0


def test_pairs_with_one_name_share_a_link() -> None:
    """The second message waits until the first has left the network card."""
    first, second, third = (
        StageCost(1.0, output_bytes=4),
        StageCost(2.0, output_bytes=4),
        StageCost(1.0),
    )
    card = Link(1.0, 1.0, "card")
    costs = Costs((first, second, third), links=((0, 2, card), (1, 2, card)))

    timeline = simulate(TWO_INTO_ONE, costs)

    assert sent(timeline) == [("0F0", 2, 1.0, 6.0), ("1F0", 2, 5.0, 10.0)]
    assert starts(timeline)["2F0"] == 10.0


def test_who_is_ready_first_goes_first_on_a_shared_link() -> None:
    """The message that is ready first goes first, wherever the schedule lists it."""
    late, early = StageCost(3.0, output_bytes=4), StageCost(2.0, output_bytes=4)
    costs = Costs((late, early, StageCost(1.0)), link=Link(0.0, 1.0, "card"))

    assert sent(simulate(TWO_INTO_ONE, costs)) == [
        ("1F0", 2, 2.0, 6.0),
        ("0F0", 2, 6.0, 10.0),
    ]


def test_among_messages_ready_at_one_instant_the_first_listed_goes_first() -> None:
    """At 1 lane d0.1 sends, and only then can d0 make and send its own, at 1 too."""
    schedule = evaluation(
        [0, 0, 0, 1],
        "0>3 1>2 2>3",
        "d0    2F0 2SEND_F0>3",
        "d0.1  0F0 0SEND_F0>3 1F0",
        "d1    3RECV_F0<0 3RECV_F0<2 3F0",
    )
    slow, fast = StageCost(1.0, output_bytes=4), StageCost(0.0, output_bytes=4)
    costs = Costs((slow, fast, fast, fast), link=Link(0.0, 1.0))

    assert sent(simulate(schedule, costs)) == [
        ("2F0", 1, 1.0, 5.0),
        ("0F0", 1, 5.0, 9.0),
    ]


def test_value_goes_once_to_each_device_that_needs_it() -> None:
    """Two readers on one device share a message; one on another has its own."""
    lanes = "d0  0F0", "d1  1F0 2F0", "d2  3F0"
    schedule = evaluation([0, 1, 1, 2], "0>1 0>2 0>3", *lanes)
    cost = StageCost(1.0, output_bytes=4)
    timeline = simulate(schedule, Costs((cost,) * 4, link=Link(0.0, 1.0)))

    assert sent(timeline) == [("0F0", 1, 1.0, 5.0), ("0F0", 2, 1.0, 5.0)]
    assert timeline.link_bytes() == {(0, 1): 4, (0, 2): 4}


def test_outputs_and_gradients_have_their_own_sizes() -> None:
    """Forward `output_bytes` of the stage before, back `input_grad_bytes` of this."""
    schedule = Schedule.parse("d0  0F0 0B0 0U\nd1  1F0 1B0 1U")
    cost = StageCost(1.0, output_bytes=3, input_grad_bytes=5)

    assert simulate(schedule, Costs((cost, cost))).link_bytes() == {
        (0, 1): 3,
        (1, 0): 5,
    }


def test_handling_keeps_the_lane_and_is_part_of_no_op() -> None:
    """A lane spends 1 s on each message, after the sender's op and before the reader's.

    d0  0F0 0-2, handling 2-3, 0F1 3-5, handling 5-6
    d1  handling 3-4, 1F0 4-6, handling 6-7, 1F1 7-9
    """
    schedule = Schedule.parse("d0  0F0 0F1\nd1  1F0 1F1")
    cost = StageCost(2.0)
    timeline = simulate(schedule, Costs((cost, cost), handling=Link(latency_s=1.0)))

    assert [s.tolist() for s in timeline.start_s] == [[0.0, 3.0], [4.0, 7.0]]
    assert [e.tolist() for e in timeline.end_s] == [[2.0, 5.0], [6.0, 9.0]]
    assert sent(timeline) == [("0F0", 1, 3.0, 3.0), ("0F1", 1, 6.0, 6.0)]
    assert timeline.lane_bubble_fraction(0) == pytest.approx(1 - 4 / 9)


def test_handling_may_grow_with_the_bytes() -> None:
    """A copy of 6 bytes at 3 bytes per second, at both ends."""
    schedule = Schedule.parse("d0  0F0\nd1  1F0")
    cost = StageCost(1.0, output_bytes=6)
    timeline = simulate(schedule, Costs((cost, cost), handling=Link(0.5, 3.0)))

    assert starts(timeline)["1F0"] == 1.0 + 2.5 + 2.5


def test_message_is_read_once_however_many_ops_need_it() -> None:
    """The second reader on the device pays no handling."""
    schedule = Schedule.parse("d0  0F0 0I0 0W0 0U\nd1  1F0 1I0 1W0 1U")
    cost = StageCost(1.0, 1.0, 1.0)
    timeline = simulate(schedule, Costs((cost, cost), handling=Link(1.0)))

    # 1F0 reads at 2-3, runs 3-4; 1I0 4-5, sends 5-6; 0I0 reads 6-7, runs 7-8
    assert starts(timeline)["0I0"] == 7.0
    assert starts(timeline)["0W0"] == 8.0


EXPLICIT = """
net model microbatches=2
stage 0 net=model device=0 trainable=no
stage 1 net=model device=1 trainable=no
flow 0>1
d0  0F0 0SEND_F0>1 0F1 0SEND_F1>1
d1  1RECV_F0<0 1F0 1RECV_F1<0 1F1
"""


def test_explicit_message_waits_for_both_ends() -> None:
    """The second is ready at 2 and begins at 5, when its RECV is reached."""
    schedule = Schedule.parse(EXPLICIT)
    costs = Costs((StageCost(1.0, output_bytes=2), StageCost(3.0)), link=Link(0.5, 4.0))
    timeline = simulate(schedule, costs)

    assert [*zip(timeline.start_s[0], timeline.end_s[0], strict=True)] == [
        (0.0, 1.0),  # 0F0
        (1.0, 2.0),  # its SEND, while the lane goes on
        (1.0, 2.0),  # 0F1
        (2.0, 6.0),  # its SEND: no RECV is posted before 5
    ]
    assert [*zip(timeline.start_s[1], timeline.end_s[1], strict=True)] == [
        (0.0, 2.0),
        (2.0, 5.0),
        (5.0, 6.0),
        (6.0, 9.0),
    ]
    assert sent(timeline) == [("0F0", 1, 1.0, 2.0), ("0F1", 1, 5.0, 6.0)]
    assert timeline.bubble_fraction == pytest.approx(1 - (2 + 6) / 2 / 9)


def test_explicit_messages_cost_handling_at_the_send_and_at_the_first_reader() -> None:
    """A RECV itself takes no time: its lane has nothing to do yet."""
    schedule = Schedule.parse(EXPLICIT)
    cost = StageCost(2.0)
    timeline = simulate(schedule, Costs((cost, cost), handling=Link(1.0)))

    # SEND reached at 2, handled at 3; read 3-4.
    assert starts(timeline)["1F0"] == 4.0
    # d1 reaches the second RECV at 6, when the message (made at 5) has been handled.
    assert starts(timeline)["0F1"] == 3.0
    assert starts(timeline)["1F1"] == 7.0


def test_message_is_not_ready_before_its_sender_has_handled_it() -> None:
    """Its RECV is reached at 2.5, while the sending lane still handles it, until 3.

    d0  0F0 0-1, SEND handled 1-3
    d1  2F0 0-2.5, RECV, handling 3-5, 1F0 5-6
    """
    lanes = "d0  0F0 0SEND_F0>1", "d1  2F0 1RECV_F0<0 1F0"
    schedule = evaluation([0, 1, 1], "0>1", *lanes)
    costs = (StageCost(1.0), StageCost(1.0), StageCost(2.5))
    timeline = simulate(schedule, Costs(costs, handling=Link(2.0)))

    assert sent(timeline) == [("0F0", 1, 3.0, 3.0)]
    assert starts(timeline)["1F0"] == 5.0


def test_receives_posted_ahead_make_explicit_messages_as_early_as_implicit() -> None:
    """Message ops change nothing about when work happens, if all RECVs are first."""
    explicit = Schedule.parse(
        EXPLICIT.replace("1F0 1RECV_F1<0 1F1", "1RECV_F1<0 1F0 1F1")
    )
    implicit = Schedule.parse(
        EXPLICIT.replace("0F0 0SEND_F0>1 0F1 0SEND_F1>1", "0F0 0F1").replace(
            "1RECV_F0<0 1F0 1RECV_F1<0 1F1", "1F0 1F1"
        )
    )
    cost = StageCost(1.0, output_bytes=2)
    costs = Costs((cost, cost), link=Link(0.25, 4.0))
    one, other = simulate(explicit, costs), simulate(implicit, costs)

    for name in ("0F0", "0F1", "1F0", "1F1"):
        assert starts(one)[name] == starts(other)[name]
    assert sent(one) == sent(other)


def test_value_without_its_message_never_comes() -> None:
    """A value without a message op does not travel, if messages are ops."""
    text = EXPLICIT.replace(" 0SEND_F1>1", "").replace(" 1RECV_F1<0", "")

    with pytest.raises(
        DeadlockError, match=r"1F1 and needs y\[stage 0, microbatch 1\]"
    ):
        simulate(Schedule.parse(text), Costs((StageCost(), StageCost())))
