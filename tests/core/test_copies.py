"""Stages that are copies of one another: their gradients are summed before updates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hocket.core.check import check
from hocket.core.costs import Costs, Link, StageCost
from hocket.core.dataflow import due_ops, needs
from hocket.core.op import Kind, Op
from hocket.core.plans.lane_plan import plan_lanes
from hocket.core.program import Net, Program, Stage
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.errors import PlanError, ScheduleError
from hocket.passes.add_messages import add_messages
from hocket.schedules import make_schedule
from tests.core.support.spans import spans

PAIR = Program(
    (Net("down", 1), Net("up", 1)),
    (Stage("down", 0), Stage("down", 1), Stage("up", 1), Stage("up", 0)),
    ((0, 1), (2, 3)),
    copies=((0, 2), (1, 3)),
)
GOOD = "d0 0F0 3F0 3B0 3R 0B0 0R 3U 0U\nd1 2F0 1F0 1B0 1R 2B0 2R 1U 2U"


def order_of(text: str) -> Schedule:
    """An order of the pair of nets."""
    return Schedule(PAIR, Schedule.parse(text).lanes)


def test_a_copy_reduces_even_without_replicas() -> None:
    """A copy's update needs the reductions of all copies."""
    reduced = {op.stage for op in due_ops(PAIR) if op.kind is Kind.REDUCE}
    needed = {str(value) for value in needs(Op(Kind.UPDATE, 0), PAIR)}

    assert reduced == {0, 1, 2, 3}
    assert {"reduced dw[stage 0]", "reduced dw[stage 2]"} <= needed


def test_the_text_form_holds_copies() -> None:
    """Printing and parsing are each other's inverse."""
    schedule = order_of(GOOD)

    assert "copies 0 2\ncopies 1 3\n" in str(schedule)
    assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 8), (6, 12)])
def test_chimera_posts_its_reductions_in_one_order(
    p: int, m: int, num_replicas: int
) -> None:
    """Chimera passes the check, for one step and for several."""
    numbers = {"num_devices": p, "num_microbatches": m, "num_replicas": num_replicas}
    check(make_schedule("chimera", **numbers, num_steps=2))


def test_reductions_in_another_order_on_the_other_device_are_a_fault() -> None:
    """NCCL would add up gradients of different stages."""
    swapped = "d0 0F0 3F0 3B0 0B0 0R 3R 3U 0U\nd1 2F0 1F0 1B0 1R 2B0 2R 1U 2U"

    check(order_of(GOOD))
    with pytest.raises(ScheduleError) as caught:
        check(order_of(swapped))
    assert caught.value.faults == (
        "device 0 posts 0R as collective 0 of those that it shares with device 1, "
        "which posts 1R there: post them in the same order on both devices",
    )


def test_reductions_in_two_lanes_need_an_order() -> None:
    """Two replicas may come to them in different orders."""
    chain = Program.chain([0, 0], 1, num_replicas=2)
    lanes = Schedule.parse("d0 0F0 1F0 1B0 0B0 0R 0U 1U\nd0.1 1R").lanes

    with pytest.raises(ScheduleError, match=r"may post .* in either order"):
        check(Schedule(chain, lanes))


def test_an_update_waits_for_the_reductions_of_all_copies() -> None:
    """Device 1 starts late, so that 3R ends when 1R, begun later, ends.

    A ring of two sends two messages of half of the 4 bytes: 4 s at 1 byte/s. Device 0
    begins 3R at 3 s, device 1 begins 1R later: device 0 must wait for it.
    """
    stage = StageCost(forward_s=1.0, input_grad_s=1.0, gradient_bytes=4, update_s=1.0)
    slow = replace(stage, forward_s=2.0)
    costs = Costs((stage, slow, slow, stage), reduce_link=Link(bytes_per_s=1.0))
    timeline = simulate(order_of(GOOD), costs)
    times = spans(timeline)

    ends = {name: times[name][1] for name in ("1R", "3R")}
    assert times["3U"][0] >= max(ends.values())
    assert times["1U"][0] >= max(ends.values())
    assert ends["1R"] - times["1R"][0] == 4.0


def test_a_reduction_over_replicas_and_copies_is_one_ring() -> None:
    """Two replicas of two copies: six messages of a quarter of the bytes."""
    stage = StageCost(forward_s=1.0, input_grad_s=1.0, gradient_bytes=4)
    costs = Costs((stage,) * 4, reduce_link=Link(bytes_per_s=1.0))
    both = replace(order_of(GOOD), program=replace(PAIR, num_replicas=2))
    spans = {str(span.op): span for span in simulate(both, costs).spans}

    assert spans["1R"].end_s - spans["1R"].start_s == 6.0


def test_no_message_brings_the_sum() -> None:
    """Each device waits for its own reduction alone, which ends with all others."""
    schedule = order_of(GOOD)
    updates = [
        p for lane in plan_lanes(schedule) for p in lane if p.op.kind is Kind.UPDATE
    ]

    assert [len(plan.waits) for plan in updates] == [1] * 4
    assert not any(plan.receives for plan in updates)
    ops = [op for lane in add_messages(schedule).lanes for op in lane.ops]
    assert sum(op.kind is Kind.SEND_FORWARD for op in ops) == 2


FIRST, *REST = PAIR.stages


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"copies": ((0, 9),)}, "stage 9 is listed as a copy, but does not exist"),
        ({"copies": ((0, 2), (2, 1))}, "stage 2 is listed as a copy more than once"),
        ({"copies": ((0,),)}, "copies 0: a group has at least two stages"),
        ({"copies": ((0, 3),)}, "copies 0 3: put each on a device of its own"),
        ({"copies": ((0, 1),)}, "copies 0 1: each must be the same part of a net"),
        # Sums of gradients at different weights would be neither's.
        ({"stages": (replace(FIRST, delay=1), *REST)}, "give all the same delay"),
        ({"stages": (replace(FIRST, trainable=False), *REST)}, "all must be trainable"),
    ],
)
def test_refuses_what_cannot_be_copies(changes: dict[str, Any], fault: str) -> None:
    """The error names the group and the way out."""
    with pytest.raises(PlanError, match=fault):
        replace(PAIR, **changes)
