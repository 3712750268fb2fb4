"""The orders that take part: the teacher first, as published, and filled.

Each device has a stage of the teacher and one of the student. Stages of the teacher are
numbered first: 0 to p - 1, and those of the student from p on.
"""

from __future__ import annotations

from dataclasses import replace

import hocket
from hocket.core.op import Kind, Op
from hocket.core.program import Net, Program, Stage
from hocket.core.schedule import Lane, Schedule
from hocket.passes.fill_with import fill_with

_NUM_STEPS = 3  # of an order with a body, which repeats


def teacher_program(
    num_devices: int, num_parts: int, num_microbatches: int, *, num_steps: int
) -> Program:
    """A frozen teacher and a student, whose loss is part of its last forwards.

    Args:
        num_devices: as many stages has each net.
        num_parts: the teacher's microbatches.
        num_microbatches: the student's.
        num_steps: of the order.
    """
    p = num_devices
    return Program(
        nets=(Net("teacher", num_parts), Net("student", num_microbatches)),
        stages=(
            *(Stage("teacher", device, trainable=False) for device in range(p)),
            *(Stage("student", device) for device in range(p)),
        ),
        flows=(
            *((s, s + 1) for s in range(2 * p - 1) if s != p - 1),
            (p - 1, 2 * p - 1),
        ),
        num_steps=num_steps,
    )


def student_order(schedule: str, num_devices: int, num_microbatches: int) -> Schedule:
    """One step of the student alone, by the name of its schedule."""
    return hocket.make_schedule(
        schedule, num_devices=num_devices, num_microbatches=num_microbatches
    )


def teacher_first(schedule: str, num_devices: int, num_microbatches: int) -> Schedule:
    """The teacher's pipeline, then the student's: one step, without anything ahead."""
    student = student_order(schedule, num_devices, num_microbatches)
    program = teacher_program(
        num_devices, num_microbatches, num_microbatches, num_steps=1
    )
    lanes = (
        Lane(
            lane.device,
            lane.stream,
            (
                *(Op(Kind.FORWARD, lane.device, i) for i in range(num_microbatches)),
                *(replace(op, stage=op.stage + num_devices) for op in lane.ops),
            ),
        )
        for lane in student.lanes
    )
    return Schedule(program, tuple(lanes))


def filled(
    schedule: str,
    num_devices: int,
    num_microbatches: int,
    num_parts: int,
    costs: hocket.Costs,
) -> Schedule:
    """The student's order with the next batch's teacher in its waits."""
    program = teacher_program(
        num_devices, num_parts, num_microbatches, num_steps=_NUM_STEPS
    )
    student = student_order(schedule, num_devices, num_microbatches)
    return fill_with(student, program, costs=costs)


def as_published(num_devices: int, num_microbatches: int) -> Schedule:
    """TSPipe's own order: a momentum teacher of delay 1, the student cut twice as fine.

    Args:
        num_devices: as many stages has each net.
        num_microbatches: the teacher's; the student has twice as many.
    """
    return hocket.make_schedule(
        "tspipe",
        num_devices=num_devices,
        num_microbatches=2 * num_microbatches,
        num_steps=_NUM_STEPS,
    )
