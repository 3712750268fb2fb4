"""Filled orders of two devices beside every order that there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import pytest

from hocket.core.op import Kind, Op
from hocket.core.schedule import Lane, Schedule
from hocket.core.simulate import simulate
from hocket.errors import ScheduleError
from hocket.schedules import SCHEDULES, Shape
from tests.in_turns import in_turns
from tests.passes.support.filled_case import Case
from tests.passes.support.teachers import equal_costs, with_teacher


@pytest.mark.parametrize(
    ("name", "teacher_s", "delay"),
    in_turns(["gpipe", "1f1b"], [0.5, 1.0, 1.5, 2.0, 3.0], [0, 1]),
)
def test_no_order_of_two_devices_is_faster(
    name: str, teacher_s: float, delay: int
) -> None:
    """All places of two forwards among the student's ops, on both devices."""
    base = SCHEDULES[name].make(Shape(2, 2))
    program = with_teacher(base.program, 2, delay=delay)
    case = Case(base, program, equal_costs(program, teacher_s))
    best_s = min(steps_s(case, delay))
    assert case.step_s() == pytest.approx(best_s)


def steps_s(case: Case, num_ahead: int) -> Iterator[float]:
    """The seconds of a step, of every order that can run."""
    per_device = [[*placements(case, d, num_ahead)] for d in range(2)]
    for lanes in product(*per_device):
        makespans_s = []
        for num_steps in (4, 6):
            program = replace(case.program, num_steps=num_steps)
            order = Schedule(program, tuple(written(lanes, num_ahead, num_steps)))
            try:
                makespans_s.append(simulate(order, case.costs).makespan_s)
            except ScheduleError:  # a deadlock
                break
        else:
            yield (makespans_s[1] - makespans_s[0]) / 2


def placements(case: Case, device: int, num_ahead: int) -> Iterator[tuple[Op, ...]]:
    """A device's step with the teacher's forwards anywhere before its updates."""
    own = [replace(op, stage=op.stage + 2) for op in case.base.lanes[device].ops]
    forwards = [Op(Kind.FORWARD, device, i, num_ahead) for i in range(2)]
    size = len(own) - 1 + len(forwards)
    for places in combinations(range(size), 2):
        ops, left = own[:-1], iter(forwards)
        for place in places:
            ops.insert(place, next(left))
        yield (*ops, own[-1], Op(Kind.UPDATE, device))


def written(
    lanes: tuple[tuple[Op, ...], ...], num_ahead: int, num_steps: int
) -> Iterator[Lane]:
    """The lanes of all steps."""
    for device, step in enumerate(lanes):
        shifts = range(-num_ahead, num_steps)
        ops = [
            replace(op, step=op.step + k)
            for k in shifts
            for op in step
            if op.step + k >= 0
        ]
        yield Lane(device, 0, tuple(op for op in ops if op.step < num_steps))
