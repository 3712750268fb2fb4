"""Cut a schedule into the portions that workers play, and plan every op of them.

The number of batches is not known in advance. A schedule with a body is played in
portions of all lanes, of which the body is repeated as long as there are batches; a
schedule without one is a body of one step, which is played alone each time:

    batches    0 1 2    │ 3    │ 4    │ end            0    │ 1    │ 2
    plays      prologue │ body │ body │ epilogue       step │ step │ step
    results    0        │ 1    │ 2    │ 3 4            0    │ 1    │ 2

The prologue has the body once behind it. Where batches end before the prologue is full,
its steps are played alone: which weights a step reads does not depend on what overlaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from hocket.core.dataflow import makes, needs
from hocket.core.gates import Gates, flushes, gates_of
from hocket.core.plans.lane_plan import OpPlan, plan_lanes, plan_portions
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.passes.one_step import one_step


class Portion(Enum):
    """A part of a schedule that is played at a time."""

    STEP = "step"
    PROLOGUE = "prologue"
    BODY = "body"
    EPILOGUE = "epilogue"


@dataclass(frozen=True, slots=True)
class PortionPlan:
    """One portion, planned for every lane of the schedule.

    Args:
        lanes: each lane's ops.
        shift: steps by which these are numbered too high. A portion is played from a
            first step on; an op then belongs to step `first + op.step - shift`.
    """

    lanes: tuple[tuple[OpPlan, ...], ...]
    shift: int = 0

    def in_order(
        self, numbers: tuple[int, ...], program: Program
    ) -> Iterator[tuple[int, OpPlan]]:
        """Yield a lane and its next op, in one order that all workers agree on.

        An op comes after those of the same lanes whose values it needs; apart from
        that, lower lanes come first.

        Args:
            numbers: the lanes of one device, ascending.
            program: says what ops need and make.
        """
        left = [list(reversed(self.lanes[number])) for number in numbers]
        due = {v for lane in left for plan in lane for v in makes(plan.op, program)}
        while any(left):
            for number, lane in zip(numbers, left, strict=True):
                while lane and due.isdisjoint(
                    (*needs(lane[-1].op, program), *lane[-1].waits)
                ):
                    plan = lane.pop()
                    due.difference_update(makes(plan.op, program))
                    yield number, plan


@dataclass(frozen=True, slots=True)
class PlayPlan:
    """Everything that workers look up in a schedule before they play it.

    Args:
        schedule: the one that is played.
        portions: its parts.
        num_steps: batches that a prologue takes.
        num_ended: how many of these steps are over when the prologue is.
        gates: the stages whose gradients are judged together.
        flushes: whether each step of the trained stages ends before the next begins.
    """

    schedule: Schedule
    portions: Mapping[Portion, PortionPlan]
    num_steps: int = 1
    num_ended: int = 1
    gates: Gates = ()
    flushes: bool = True

    @property
    def overlaps(self) -> bool:
        """Whether steps overlap: the schedule has a body."""
        return Portion.BODY in self.portions

    @property
    def program(self) -> Program:
        """The schedule's program."""
        return self.schedule.program


def plan_to_play(schedule: Schedule, *, clips: bool = False) -> PlayPlan:
    """Plan a schedule of one step, or one with a body.

    Args:
        schedule: accepted by `check`, without explicit messages.
        clips: whether gradients are clipped, by the norms of gates.
    """
    gates = gates_of(schedule, clips=clips)
    parts = {Portion.STEP: PortionPlan(plan_lanes(one_step(schedule), gates))}
    if not schedule.body:
        return PlayPlan(schedule, parts, gates=gates)
    cut, prologue, body, epilogue = plan_portions(schedule, gates)
    parts |= {
        Portion.PROLOGUE: PortionPlan(prologue),
        Portion.BODY: PortionPlan(body),
        Portion.EPILOGUE: PortionPlan(epilogue, 1),
    }
    num_steps, is_flushed = cut.num_steps, flushes(schedule)
    return PlayPlan(schedule, parts, num_steps, cut.num_ended, gates, is_flushed)
