"""Find which ops of one device are ordered by messages to other devices and back.

Between two lanes of a device there may be no event, but a path of messages:

    d0     0F1 ───╮                 0W1 ──▶ 0F0 ───╮
    d1     lane 0 ╰▶ 1F1 ──▶ 1B1 ───╯              │
           lane 1                                  ╰▶ 1F0 comes after 1F1, in any run

The sanitizer of a device sees its own events only: these orders become events for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from hocket.core.dataflow import Value, makes
from hocket.core.op import STEP_ENDS, Op
from hocket.core.program import Program
from hocket.run.engine.lanes.play_plan import PortionPlan

# Of each lane of the device: how many of its ops have come before.
_Clock: TypeAlias = tuple[int, ...]


def ordered_by_messages(
    part: PortionPlan, numbers: tuple[int, ...], program: Program
) -> dict[Op, tuple[Op, ...]]:
    """Return the ops of other lanes that come before an op by way of its messages.

    Args:
        part: the portion, with the lanes of all devices.
        numbers: the lanes of one device, ascending.
        program: says what ops make.

    Returns:
        Of each op that receives messages: the last op of each other lane of the device
        that its messages come after. Steps count from the portion's first.
    """
    every = tuple(range(len(part.lanes)))
    now: dict[int, _Clock] = dict.fromkeys(every, (0,) * len(numbers))
    made: dict[Value, _Clock] = {}
    found: dict[Op, list[Op]] = {}
    for number, plan in part.in_order(every, program):
        received = [made[x.value] for x in plan.receives if x.value in made]
        waited = [made[value] for value in plan.waits if value in made]
        clock = now[number]
        if number in numbers and received:
            heard = tuple(map(max, *received, received[0]))
            found[plan.op] = [
                last
                for other, count in zip(numbers, heard, strict=True)
                if other != number and (last := _last_sender(part, other, count))
            ]
        for other in (*received, *waited):
            clock = tuple(map(max, clock, other))
        if number in numbers:
            place = numbers.index(number)
            clock = (*clock[:place], clock[place] + 1, *clock[place + 1 :])
        now[number] = clock
        made.update(dict.fromkeys(makes(plan.op, program), clock))
    return {
        _shifted(op, part): tuple(_shifted(x, part) for x in before)
        for op, before in found.items()
    }


def _last_sender(part: PortionPlan, lane: int, count: int) -> Op | None:
    """Return the last of a lane's first ops that may send: R and U send nothing."""
    ops = (plan.op for plan in reversed(part.lanes[lane][:count]))
    return next((op for op in ops if op.kind not in STEP_ENDS), None)


def _shifted(op: Op, part: PortionPlan) -> Op:
    return replace(op, step=op.step - part.shift)
