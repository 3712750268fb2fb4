"""Cut two rows of layers over the same devices, with the fastest slowest device.

    student   3  1  4 │ 1  5 │ 9         a device does a stage of each net: what one net
    teacher   1 │ 2  3  2 │ 1            has too much of, the other has too little
    device      9     │ 13   │ 10

The least time of the slowest device is found by bisection: whether a limit is possible
follows from the most layers of the teacher that the first devices can take, for each
number of the student's layers that they have. Messages are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import numpy as np

from hocket.core.timelines.arrays import Floats, Ints
from hocket.planner.balance import Balancer

_NUM_BISECTIONS: Final = 60  # of an interval that is as wide as the result, or less
_SLACK: Final = 1 + 1e-12  # sums of the same seconds differ in their last digits


class JointCut(NamedTuple):
    """Where the stages of two nets begin.

    Args:
        student: the layers at which the student's stages 1, 2, ... begin.
        teacher: the same of the teacher; of two equal ones, the first device has none
            of its layers.
    """

    student: tuple[int, ...]
    teacher: tuple[int, ...]

    def device_s(
        self, student_s: Sequence[float], teacher_s: Sequence[float]
    ) -> tuple[float, ...]:
        """Return the seconds of each device, given those of all layers."""
        return tuple(
            a + b
            for a, b in zip(
                _sums(student_s, self.student),
                _sums(teacher_s, self.teacher),
                strict=True,
            )
        )


def joint_balance(
    student_s: Sequence[float], teacher_s: Sequence[float], num_stages: int
) -> JointCut:
    """Return cuts with the fastest slowest device, up to the last digits.

    Args:
        student_s: seconds of each layer of the student in a step.
        teacher_s: the same of the teacher.
        num_stages: the devices; each has at least one layer of the student.

    Raises:
        ShapeError: the student has fewer layers than stages.
    """
    no_messages = [0.0] * (len(student_s) - 1)
    best = Balancer(student_s, no_messages).cut(num_stages)
    least_s, most_s = 0.0, max(_sums(student_s, best)) + sum(teacher_s)
    for _ in range(_NUM_BISECTIONS):
        middle_s = (least_s + most_s) / 2
        found = _student_cut(student_s, teacher_s, num_stages, middle_s)
        if found is None:
            least_s = middle_s
        else:
            most_s, best = middle_s, found
    return JointCut(best, cut_teacher(_sums(student_s, best), teacher_s))


def _student_cut(
    student_s: Sequence[float],
    teacher_s: Sequence[float],
    num_stages: int,
    limit_s: float,
) -> tuple[int, ...] | None:
    """Return a cut of the student with which no device needs more; None if none is."""
    until = np.array([0.0, *accumulate(student_s)])
    until_teacher = np.array([0.0, *accumulate(teacher_s)])
    rest_s = limit_s * _SLACK - (until[None, :] - until[:, None])  # [begin, end]
    places = np.arange(until.size)
    is_stage = (places[:, None] < places[None, :]) & (rest_s >= 0)
    reached = np.where(places == 0, 0, -1)  # the teacher's layers; -1: not possible
    came_from: list[Ints] = []
    for _ in range(num_stages):
        begin_s = until_teacher[np.maximum(reached, 0)][:, None]
        end = np.searchsorted(until_teacher, begin_s + rest_s, side="right") - 1
        end = np.where(is_stage & (reached >= 0)[:, None], end, -1)
        came_from.append(end.argmax(axis=0))
        reached = end.max(axis=0)
    if reached[-1] < len(teacher_s):
        return None
    boundaries = [len(student_s)]
    for choice in reversed(came_from):
        boundaries.append(int(choice[boundaries[-1]]))
    return tuple(reversed(boundaries[1:-1]))


def cut_teacher(
    student_s: Sequence[float], teacher_s: Sequence[float]
) -> tuple[int, ...]:
    """Return the teacher's cut for devices that have other work.

    It has the fastest slowest device, and of these cuts the least sum of squares.

    Args:
        student_s: seconds of the other work of each device in a step.
        teacher_s: the same of each layer of the teacher.

    Returns:
        The layers at which the stages on devices 1, 2, ... begin; of two equal ones,
        the first device has none of the layers.
    """
    until = np.array([0.0, *accumulate(teacher_s)])
    places = np.arange(until.size)
    is_stage = places[:, None] <= places[None, :]
    stage_s = until[None, :] - until[:, None]
    devices = [np.where(is_stage, own_s + stage_s, np.inf) for own_s in student_s]
    slowest = devices[0][0]
    for device_s in devices[1:]:
        slowest = np.maximum(slowest[:, None], device_s).min(axis=0)
    limit_s = float(slowest[-1]) * _SLACK
    best: Floats | None = None
    came_from: list[Ints] = []
    for device_s in devices:
        square = np.where(device_s <= limit_s, device_s, np.inf) ** 2
        joined = square[:1] if best is None else best[:, None] + square
        came_from.append(joined.argmin(axis=0))
        best = joined.min(axis=0)
    boundaries = [len(teacher_s)]
    for choice in reversed(came_from[1:]):
        boundaries.append(int(choice[boundaries[-1]]))
    return tuple(reversed(boundaries[1:]))


def _sums(layer_s: Sequence[float], boundaries: Sequence[int]) -> tuple[float, ...]:
    edges = (0, *boundaries, len(layer_s))
    return tuple(sum(layer_s[begin:end]) for begin, end in pairwise(edges))
