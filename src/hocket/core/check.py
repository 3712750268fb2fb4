"""Everything that is wrong with a schedule, at once, with the picture.

What is proved of a schedule that passes:

1. every op that the program wants is there exactly once, on its own device;
2. played under rendezvous sends and bounded receive buffers, every lane comes to its
   end;
3. every forward, and its backward, read the weights that the stage's delay promises,
   and so many versions of them must be alive;
4. explicit messages are posted in the same order at both ends of each pair of devices;
5. the body of a flush-free order is the same work, one step later, each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hocket.core.checker.faults import (
    body_faults,
    message_order_faults,
    op_faults,
    too_much_due,
)
from hocket.core.checker.play import play
from hocket.core.costs import Costs
from hocket.core.dataflow import version_read
from hocket.core.op import BACKWARDS, Kind, Op
from hocket.core.schedule import Schedule
from hocket.core.simulator.work import Work, prepare
from hocket.errors import DeadlockError, ScheduleError


@dataclass(frozen=True, slots=True)
class Proof:
    """What `check` found out about a schedule that may run.

    Args:
        num_buffers: the fewest receive buffers per flow with which it never waits
            for ever, even where a send ends only when the other side has a buffer.
        num_versions: of each stage's weights, the most alive at once.
    """

    num_buffers: int
    num_versions: tuple[int, ...]


def check(schedule: Schedule, *, num_buffers: int | None = None) -> Proof:
    """Prove that a schedule may run, or say everything that is wrong with it.

    Args:
        schedule: any; nothing about it is taken for granted.
        num_buffers: receive buffers per flow that it must get along with; the fewest
            that do are found when not given.

    Raises:
        ScheduleError: with all faults, and the picture.
        DeadlockError: it is complete, but lanes wait for each other.
    """
    faults = too_much_due(schedule) or [
        *op_faults(schedule),
        *body_faults(schedule),
    ]
    if faults:
        raise ScheduleError(
            tuple(text for text, _ in faults),
            _picture(schedule, wrong={op for _, op in faults if op is not None}),
        )
    order_faults = tuple(message_order_faults(schedule))
    work = prepare(schedule, Costs.uniform())
    least, _ = _least_buffers(work, num_buffers)
    if order_faults:
        raise ScheduleError(order_faults, str(schedule))
    return Proof(least, tuple(_versions_alive(schedule)))


def _least_buffers(work: Work, num_buffers: int | None) -> tuple[int, list[int]]:
    """The fewest buffers that do, and an order in which all ops may start."""
    program = work.schedule.program
    most = program.num_steps * max(net.num_microbatches for net in program.nets)
    tries = range(1, most + 1) if num_buffers is None else (num_buffers,)
    for number in tries:
        played = play(work, number)
        if not played.stuck:
            return number, played.order
        if not any(stand.is_sending for stand in played.stuck):
            break  # more buffers cannot help
    sentences = ("no lane can move, each waits for another:", *map(str, played.stuck))
    stands = {stand.lane: stand.position for stand in played.stuck}
    raise DeadlockError(sentences, _picture(work.schedule, stands=stands))


def _versions_alive(schedule: Schedule) -> Iterator[int]:
    """Of each stage, the most versions of its weights alive at once.

    Read off the order of its device's ops: a version lives from the update that makes
    it to the last forward or backward that reads it, and the newest always lives.
    """
    program = schedule.program
    for number, stage in enumerate(program.stages):
        if not stage.moves:
            yield 1
            continue
        last_read: dict[int, int] = {}
        made = {0: 0}
        ops = [
            op
            for lane in schedule.lanes
            for op in lane.ops
            if op.stage == number and lane.device == stage.device
        ]
        for i, op in enumerate(ops):
            if op.kind is Kind.UPDATE:
                made[op.step + 1] = i
            elif op.kind in BACKWARDS or op.kind is Kind.FORWARD:
                last_read[version_read(number, op.step, program)] = i
        yield max(
            sum(
                begin <= i and (version == newest or last_read.get(version, -1) > i)
                for version, begin in made.items()
            )
            for newest, i in made.items()
        )


def _picture(
    schedule: Schedule,
    *,
    wrong: set[Op] | None = None,
    stands: dict[int, int] | None = None,
) -> str:
    """The lanes, with marks."""
    lines = []
    for i, lane in enumerate(schedule.lanes):
        words = [f"! {op}" if wrong and op in wrong else str(op) for op in lane.ops]
        if stands is not None and i in stands:
            words.insert(stands[i], ">")
        lines.append(f"{lane.label}  {' '.join(words)}")
    return "\n".join(lines)
