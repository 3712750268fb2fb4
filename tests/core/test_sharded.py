"""Sharded stages: whole where their weights are read, sharded where they change."""

from __future__ import annotations

import pytest

from hocket.core.check import check
from hocket.core.checker.links import Links
from hocket.core.dataflow import lane_needs, needs
from hocket.core.op import Kind, Op
from hocket.core.plans.lane_plan import plan_lanes
from hocket.core.schedule import Schedule
from hocket.errors import ScheduleError
from hocket.passes.add_gathers import KEEPS, Keep, add_gathers
from hocket.schedules import make_schedule
from tests.core.support.gathered import is_gathered_right, with_one_moved

HEADER = """steps 1
replicas 1
shards 2
net model microbatches=2
stage 0 net=model device=0
"""
RIGHT = "0UNSHARD0 0F0 0F1 0RESHARD0 0UNSHARD1 0B0 0B1 0RESHARD1 0R 0U"


def one_stage(lane: str) -> Schedule:
    """One sharded stage on one device."""
    return Schedule.parse(f"{HEADER}d0 {lane}")


def faults(schedule: Schedule) -> tuple[str, ...]:
    """All that is wrong with an order; nothing where it may run."""
    try:
        check(schedule)
    except ScheduleError as error:
        return error.faults
    return ()


def test_an_order_that_gathers_twice_may_run() -> None:
    """And prints and parses."""
    schedule = one_stage(RIGHT)

    assert not faults(schedule)
    assert Schedule.parse(str(schedule)) == schedule
    check(schedule, links=Links.ONE_QUEUE)


@pytest.mark.parametrize(
    ("lane", "says"),
    [
        (
            RIGHT.replace("0UNSHARD0 ", ""),
            (
                "0F0 on device 0 reads the weights of stage 0 while it is sharded: put "
                "0UNSHARD0 before it (hocket.passes.add_gathers places them all)",
                "0RESHARD0 on device 0 releases the whole weights of stage 0, which is "
                "sharded there: leave it out, or put 0UNSHARD0 before it",
                "0UNSHARD1 on device 0 is gather 0 of stage 0 in step 0: write "
                "0UNSHARD0, since they are numbered from 0",
            ),
        ),
        (
            RIGHT.replace("0RESHARD0 ", ""),
            (
                "0UNSHARD1 on device 0 gathers stage 0, which is whole by 0UNSHARD0: "
                "put 0RESHARD0 between them, or leave 0UNSHARD1 out",
            ),
        ),
        (
            RIGHT.replace("0RESHARD1 0R 0U", "0R 0U 0RESHARD1"),
            (
                "0U on device 0 updates stage 0 while it is whole by 0UNSHARD1: put "
                "0RESHARD1 before it",
            ),
        ),
        (
            RIGHT.replace("0RESHARD1 0R 0U", "0R 0RESHARD1 0U 0UNSHARD2 0RESHARD2"),
            (
                "0UNSHARD2 on device 0 gathers the weights of stage 0 after 1 updates, "
                "but step 0 reads those after 0, and a shard has one version: put it "
                "before 0U",
                "no op between 0UNSHARD2 and 0RESHARD2 on device 0 reads the weights "
                "of stage 0: leave both out",
            ),
        ),
        (
            RIGHT.replace("0RESHARD1 ", "0RESHARD0 "),
            (
                "0RESHARD0 on device 0 releases what 0UNSHARD1 gathered: write "
                "0RESHARD1",
            ),
        ),
        (
            RIGHT.replace("0UNSHARD1", "0UNSHARD9"),
            ("0UNSHARD9 is no op of this program (1 stages, 2 microbatches, 1 steps, "
             "1 replicas of 2 shards)",),
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(lane: str, says: tuple[str, ...]) -> None:
    """The op, its device, why, and what to write."""
    found = faults(one_stage(lane))

    assert set(says) <= set(found)


def test_a_stage_that_is_whole_at_the_end_is_named() -> None:
    """In evaluation nothing updates it, and it must be sharded all the same."""
    text = "".join(
        (
            "steps 1\nreplicas 1\nshards 2\nnet model microbatches=1\n",
            "stage 0 net=model device=0 trainable=no\nd0 0UNSHARD0 0F0",
        )
    )

    assert faults(Schedule.parse(text)) == (
        "stage 0 on device 0 is whole by 0UNSHARD0 when the lane ends: put 0RESHARD0 "
        "behind the last op that reads its weights",
    )
    assert not faults(Schedule.parse(text + " 0RESHARD0"))


def test_no_stage_is_whole_from_step_to_step() -> None:
    """Nor gathered for the next step before this one has ended on the device."""
    text = "".join(
        (
            "steps 2\nreplicas 1\nshards 2\nnet model microbatches=1\n",
            "stage 0 net=model device=0 trainable=no\nd0 ",
        )
    )
    once = "0UNSHARD0 0F0 0RESHARD0"
    twice = f"{once} 0UNSHARD0@1 0F0@1 0RESHARD0@1"

    assert not faults(Schedule.parse(text + twice))
    assert faults(Schedule.parse(text + "0UNSHARD0 0F0 0F0@1 0RESHARD0")) == (
        "stage 0 on device 0 is whole by 0UNSHARD0 when 0F0@1 of another step comes: "
        "put 0RESHARD0 behind the last op that reads its weights",
        "0F0@1 on device 0 reads the weights of stage 0 while it is whole for step 0 "
        "alone: put 0UNSHARD0@1 before it (hocket.passes.add_gathers places them all)",
    )


def test_no_stage_is_whole_where_a_body_repeats() -> None:
    """The runtime may stop there, and swap or load what is sharded."""
    text = "".join(
        (
            "steps 2\nreplicas 1\nshards 2\nnet model microbatches=1\n",
            "stage 0 net=model device=0 trainable=no\nrepeats 2\nd0 ",
        )
    )
    once = "0UNSHARD0 0F0 0RESHARD0"
    later = once.replace(" ", "@1 ") + "@1"
    ahead = (
        "0UNSHARD0 |: 0F0 0RESHARD0 0UNSHARD0@1 0F0@1 0RESHARD0@1 0UNSHARD0@2 :| "
        "0F0@2 0RESHARD0@2"
    )
    begins = text.replace("steps 2", "steps 3") + ahead

    assert not faults(Schedule.parse(f"{text}|: {once} {later} :|"))
    assert any("body begins or ends" in x for x in faults(Schedule.parse(begins)))


def test_gathers_without_shards_are_refused_by_name() -> None:
    """A program with whole stages has no such op."""
    found = faults(Schedule.parse("d0 0UNSHARD0 0F0 0RESHARD0 0B0 0U"))

    assert found == tuple(
        f"{op} on device 0 is for sharded stages, but num_shards is 1: leave it out, "
        'or set num_shards (in text a line "shards 2")'
        for op in ("0UNSHARD0", "0RESHARD0")
    )


def test_a_sharded_stage_has_one_lane() -> None:
    """Else it would be open whether an op reads whole weights."""
    lanes = "d0 0UNSHARD0 0F0 0I0 0RESHARD0 0R 0U\nd0.1 0W0"
    text = HEADER.replace("microbatches=2", "microbatches=1") + lanes

    assert faults(Schedule.parse(text))[0] == (
        "0W0 on lane d0.1 is of stage 0, which is sharded and has ops on lane d0: put "
        "its UNSHARD, RESHARD, U, and all that reads its weights in one lane"
    )


def test_all_shards_post_gathers_in_one_order() -> None:
    """Two lanes of a device could gather in either order; by one lane it is fixed."""
    header = "".join(
        (
            "steps 1\nreplicas 1\nshards 2\nnet model microbatches=1\n",
            "stage 0 net=model device=0\nstage 1 net=model device=0\nflow 0>1\n",
        )
    )
    first = "0UNSHARD0 0F0 0B0 0RESHARD0 0R 0U"
    second = "1UNSHARD0 1F0 1B0 1RESHARD0 1R 1U"
    inside = f"0UNSHARD0 0F0 {second} 0B0 0RESHARD0 0R 0U"

    assert not faults(Schedule.parse(f"{header}d0 {inside}"))
    (fault,) = faults(Schedule.parse(f"{header}d0 {first}\nd0.1 {second}"))
    assert fault == (
        "device 0 may post 0UNSHARD0 on lane d0 and 1UNSHARD0 on lane d0.1 in either "
        "order, but its replicas or copies must post them in the same one: put both in "
        "one lane"
    )


@pytest.mark.parametrize("keeps", KEEPS)
@pytest.mark.parametrize(
    ("name", "num_steps"),
    [("1f1b", 2), ("zb-h1", 1), ("interleaved-1f1b", 1), ("forward-only", 2)],
)
def test_no_gather_can_be_moved_where_it_is_wrong(
    name: str, num_steps: int, keeps: Keep
) -> None:
    """Of all orders with one of them moved, removed or doubled, the right ones pass."""
    schedule = make_schedule(
        name, num_devices=2, num_microbatches=2, num_steps=num_steps, num_shards=2
    )
    schedule = add_gathers(schedule, keeps)
    verdicts = set()
    for moved in with_one_moved(schedule):
        right = is_gathered_right(moved)
        verdicts.add(right)
        assert right == (not faults(moved)), str(moved)

    assert is_gathered_right(schedule)
    assert verdicts == {True, False}


def test_an_op_waits_for_the_gather_before_it() -> None:
    """Which one that is, the order says; the first reader waits for its event."""
    schedule = one_stage(RIGHT)
    (lane,) = plan_lanes(schedule)
    waits = {str(plan.op): [*map(str, plan.waits)] for plan in lane if plan.waits}

    assert waits == {
        "0F0": ["whole weights[stage 0, microbatch 0]"],
        "0B0": ["whole weights[stage 0, microbatch 1]"],
        "0U": ["reduced dw[stage 0]"],
    }
    read = dict(lane_needs(schedule.lanes[0].ops, schedule.program))
    assert [str(v) for v in read[Op(Kind.BACKWARD, 0, 0)]] == [
        "y[stage 0, microbatch 0]",
        "weights[stage 0, after 0 updates]",
        "whole weights[stage 0, microbatch 1]",
    ]


def test_what_is_released_is_what_was_gathered() -> None:
    """RESHARD reads what UNSHARD of the same number makes."""
    program = one_stage(RIGHT).program

    assert [*map(str, needs(Op.parse("0RESHARD1"), program))] == [
        "whole weights[stage 0, microbatch 1]"
    ]
