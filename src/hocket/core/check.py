"""Find everything that is wrong with a schedule, and show it in the picture.

What is proved of a schedule that passes:

1. every op that the program wants is there exactly once, on its own device;
2. played under rendezvous sends and bounded receive buffers, every lane comes to its
   end;
3. every forward, and its backward, read the weights that the stage's delay promises,
   and so many versions of them must be alive;
4. ops that change one thing in place (gradients, buffers) have a path of events between
   them, in whichever lanes they are;
5. explicit messages are posted in the same order at both ends of each pair of devices,
   and collectives on all devices that share a group;
6. the body of a flush-free order is the same work, one step later, each time;
7. for links that need one (`Links.ONE_QUEUE`, as of NCCL): the messages of all devices
   have an order in which every device comes to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hocket.core.checker.alive import count_alive
from hocket.core.checker.collectives import collective_faults
from hocket.core.checker.conflicts import conflicts
from hocket.core.checker.faults import (
    Fault,
    body_faults,
    message_order_faults,
    op_faults,
    too_much_due,
)
from hocket.core.checker.happens_before import HappensBefore
from hocket.core.checker.links import Links, check_queues
from hocket.core.checker.play import Stand, play
from hocket.core.checker.shared import find_accesses
from hocket.core.costs import Costs
from hocket.core.op import Op
from hocket.core.plans.lane_plan import plan_lanes
from hocket.core.plans.message_order import ops_together, plan_queues
from hocket.core.plans.portions import Plans, plan_portions
from hocket.core.schedule import Schedule
from hocket.core.simulator.work import prepare
from hocket.errors import DeadlockError, ScheduleError


@dataclass(frozen=True, slots=True)
class Proof:
    """What `check` found out about a schedule that may run.

    Args:
        num_buffers: the fewest receive buffers per flow with which it never waits
            for ever, even where a send ends only when the other side has a buffer.
            One lane has such buffers of its own at each device that it sends to.
        num_versions: the most versions of each stage's weights that are alive at once,
            over every order of ops that lanes and values allow.
        num_gradients: the most steps of each stage whose gradients are begun and not
            yet used by an update, over every such order; 0 if it is not trained.
    """

    num_buffers: int
    num_versions: tuple[int, ...]
    num_gradients: tuple[int, ...]


def check(
    schedule: Schedule,
    *,
    num_buffers: int | None = None,
    links: Links = Links.RENDEZVOUS,
) -> Proof:
    """Prove that a schedule may run, or say everything that is wrong with it.

    Args:
        schedule: any schedule; nothing about it is assumed.
        num_buffers: receive buffers per flow that must suffice; the fewest that do are
            found when not given.
        links: the strictest links that it must run on. `ONE_QUEUE` holds for an order
            without explicit messages; their order is planned.

    Raises:
        PlanError: the links are `ONE_QUEUE`, and there are explicit messages.
        ScheduleError: with all faults, and the picture.
        DeadlockError: it is complete, but lanes wait for each other.
    """
    _refuse(
        schedule,
        too_much_due(schedule) or [*op_faults(schedule), *body_faults(schedule)],
    )
    work = prepare(schedule, Costs.uniform())
    played = play(work, num_buffers)
    _refuse_stuck(schedule, played.stuck)
    accesses = find_accesses(work.columns, schedule.program)
    before = HappensBefore(work.columns, work.needs, played.order)
    _refuse(
        schedule,
        [
            *message_order_faults(schedule),
            *collective_faults(work, before, played.order),
            *conflicts(schedule, work.columns, accesses, before, played.order),
        ],
    )
    if links is Links.ONE_QUEUE:
        _check_message_order(schedule)
    alive = count_alive(schedule.program, work.columns, accesses, before)
    return Proof(played.num_buffers, alive.num_versions, alive.num_gradients)


def _check_message_order(schedule: Schedule) -> None:
    """Plan the messages of each portion that is played at a time, and prove them."""
    devices = [lane.device for lane in schedule.lanes]
    plans: Sequence[Plans] = [plan_lanes(schedule)]
    if schedule.body:
        plans = plan_portions(schedule)[1:]
    together = ops_together(schedule.program)
    for lanes in plans:
        check_queues(plan_queues(lanes, devices, together), together)


def _refuse(schedule: Schedule, faults: list[Fault]) -> None:
    if faults:
        raise ScheduleError(
            tuple(text for text, _ in faults),
            _picture(schedule, wrong={op for _, op in faults if op is not None}),
        )


def _refuse_stuck(schedule: Schedule, stuck: list[Stand]) -> None:
    if stuck:
        sentences = ("no lane can move, each waits for another:", *map(str, stuck))
        stands = {stand.lane: stand.position for stand in stuck}
        raise DeadlockError(sentences, _picture(schedule, stands=stands))


def _picture(
    schedule: Schedule,
    *,
    wrong: set[Op] | None = None,
    stands: dict[int, int] | None = None,
) -> str:
    """Write the lanes, with marks."""
    lines = []
    for i, lane in enumerate(schedule.lanes):
        words = [f"! {op}" if wrong and op in wrong else str(op) for op in lane.ops]
        if stands is not None and i in stands:
            words.insert(stands[i], ">")
        lines.append(f"{lane.label}  {' '.join(words)}")
    return "\n".join(lines)
