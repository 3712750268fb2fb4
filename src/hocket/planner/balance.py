"""Cuts a row of layers into stages, with the fastest possible slowest stage.

    layers   3  1  4 │ 1  5 │ 9        3 stages, the slowest takes 9
    stage       8    │   6  │ 9

A boundary that more bytes cross than the narrowest one costs the stages beside it time:
each takes half as much longer as the messages there and back do.

    layers     3   1   4   1 │ 5 │ 9
    messages     1   1   6   1   1
    stage            9         5   9

Where devices differ, a stage takes as many times longer as its device does.

The result is exact: dynamic programming covers all cuts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import Final, NamedTuple

import numpy as np

from hocket.core.costs import Link
from hocket.core.timelines.arrays import Floats, Ints
from hocket.errors import ShapeError
from hocket.planner.work import LayerCost


class Balancer:
    """Cuts one row of layers into different numbers of stages.

    Args:
        layer_s: seconds of each layer.
        message_s: seconds of the messages, there and back, across the boundary before
            each layer but the first. Only differences count: boundaries that are all
            as wide cost nothing.
    """

    def __init__(self, layer_s: Sequence[float], message_s: Sequence[float]) -> None:
        """Compute the seconds of every possible stage."""
        self.num_layers = len(layer_s)
        until = np.array([0.0, *accumulate(layer_s)])
        least_s = min(message_s, default=0.0)
        wider_s = np.array([0.0, *((s - least_s) / 2 for s in message_s), 0.0])
        stage_s = until[None, :] - until[:, None] + wider_s[:, None] + wider_s[None, :]
        places = np.arange(self.num_layers + 1)
        is_stage = places[:, None] < places[None, :]
        self._stage_s: Floats = np.where(is_stage, stage_s, inf)  # [begin, end]
        self._slowest_s = [np.full(self.num_layers + 1, inf), self._stage_s[0]]
        self._cuts: dict[tuple[float, ...], tuple[int, ...]] = {}

    @classmethod
    def of(
        cls, layers: Sequence[LayerCost], link: Link, before_s: float = 0.0
    ) -> Balancer:
        """Cut these layers, with messages over this link between any two stages.

        Args:
            layers: the layers.
            link: the link between any two devices.
            before_s: seconds of other work on the first stage's device.
        """
        layer_s = [layer.forward_s + layer.backward_s for layer in layers]
        layer_s[:1] = [seconds + before_s for seconds in layer_s[:1]]
        return cls(
            layer_s,
            [
                link.occupied_s(layer.received_bytes + layer.received_grad_bytes)
                for layer in layers[1:]
            ],
        )

    def cut(self, num_stages: int, slowness: Sequence[float] = ()) -> tuple[int, ...]:
        """Return the boundaries with the fastest possible slowest stage.

        Dynamic programming over (stages, layers), in `num_stages * num_layers^2` steps.
        Of the cuts that are equally good, the one whose stages differ least (the
        smallest sum of squares) is taken.

        Args:
            num_stages: the number of stages, each of at least one layer.
            slowness: how many times longer than the layers' seconds each stage's device
                takes; empty if all devices are alike.

        Returns:
            The layers at which stages 1, 2, ... begin.

        Raises:
            ShapeError: there are fewer layers than stages.
        """
        if not 1 <= num_stages <= self.num_layers:
            raise ShapeError(
                f"{self.num_layers} layers cannot be cut into {num_stages} stages; 1 "
                f"to {self.num_layers} are possible"
            )
        key = tuple(slowness) or (1.0,) * num_stages
        if key not in self._cuts:
            self._cuts[key] = self._smoothest(key)
        return self._cuts[key]

    def _slowest(self, slowness: tuple[float, ...]) -> float:
        """Return the least time of the slowest stage."""
        num_stages = len(slowness)
        if {*slowness} != {1.0}:
            return _least_slowest(self._stage_s * factor for factor in slowness)
        while len(self._slowest_s) <= num_stages:
            before = self._slowest_s[-1][:, None]
            self._slowest_s.append(np.maximum(before, self._stage_s).min(axis=0))
        return float(self._slowest_s[num_stages][-1])

    def _smoothest(self, slowness: tuple[float, ...]) -> tuple[int, ...]:
        """Return, of the cuts that are equally good, the one with the least squares."""
        slowest_s = self._slowest(slowness)
        squares = {x: self._squares(x, slowest_s) for x in {*slowness}}
        return _least_sum([squares[factor] for factor in slowness])

    def _squares(self, factor: float, slowest_s: float) -> Floats:
        """Return the squares of stages' seconds on a device, `inf` for longer ones."""
        stage_s = self._stage_s * factor
        with np.errstate(over="ignore"):
            return np.where(stage_s <= slowest_s, stage_s * stage_s, inf)


def _least_slowest(devices: Iterable[Floats]) -> float:
    """Return the least time of the slowest device, over all cuts.

    Args:
        devices: the seconds of each device's stage, by where it begins and ends.
    """
    first, *others = devices
    slowest_s = first[0]
    for device_s in others:
        slowest_s = np.maximum(slowest_s[:, None], device_s).min(axis=0)
    return float(slowest_s[-1])


def _least_sum(devices: Sequence[Floats]) -> tuple[int, ...]:
    """Return where stages begin in the cut with the least sum over all devices.

    Args:
        devices: a number for each device's stage, by where it begins and ends.
    """
    best: Floats = devices[0][0]
    came_from: list[Ints] = []
    for device in devices[1:]:
        joined = best[:, None] + device
        came_from.append(joined.argmin(axis=0))
        best = joined.min(axis=0)
    return traced(came_from, best.size - 1)


def traced(came_from: Sequence[Ints], end: int) -> tuple[int, ...]:
    """Return where stages begin, followed back from the last one's end.

    Args:
        came_from: for each stage but the first, where it begins, by where it ends.
        end: where the last stage ends.
    """
    ends = [end]
    for choice in reversed(came_from):
        ends.append(int(choice[ends[-1]]))
    return tuple(reversed(ends[1:]))


# Cut two rows of layers over the same devices, with the fastest slowest device.
#
#     student   3  1  4 │ 1  5 │ 9      a device does a stage of each net: what one net
#     teacher   1 │ 2  3  2 │ 1         has too much of, the other has too little
#     device      9     │ 13   │ 10
#
# The least time of the slowest device is found by bisection: whether a limit is
# possible follows from the most layers of the teacher that the first devices can take,
# for each number of the student's layers that they have. Messages are not counted.

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
    return traced(came_from[1:], len(student_s))


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
    limit_s = _least_slowest(devices) * _SLACK
    return _least_sum([np.where(x <= limit_s, x, np.inf) ** 2 for x in devices])


def _sums(layer_s: Sequence[float], boundaries: Sequence[int]) -> tuple[float, ...]:
    edges = (0, *boundaries, len(layer_s))
    return tuple(sum(layer_s[begin:end]) for begin, end in pairwise(edges))
