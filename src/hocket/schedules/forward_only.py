"""Forward only: evaluation, on the same stages as any training schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from hocket.core.costs import StageCost
from hocket.core.op import Kind, Op
from hocket.core.schedule import Schedule
from hocket.core.step_end import repeat_step
from hocket.errors import ShapeError
from hocket.schedules.entry import Entry, Shape
from hocket.schedules.looped_bfs import looped_num_buffers


def forward_only(shape: Shape, *, devices: Sequence[int] = ()) -> Schedule:
    """Run forwards alone, all microbatches of one stage before the next: evaluation.

    Nothing is trainable, so there is no backward and no update, and no activation is
    kept. A step is one batch; the next one starts without waiting for the last.

    Bubble of all steps together: `(p - 1) * F / v`, if `m >= p`; with fewer
    microbatches each further stage of each step waits for `p - m` more. A device holds
    `1 / v` units of activations.

    >>> print(forward_only(Shape(num_devices=3, num_microbatches=4)))
    d0  0F0 0F1 0F2 0F3
    d1  1F0 1F1 1F2 1F3
    d2  2F0 2F1 2F2 2F3

    The stages of any training schedule, here of one that turns at the last device:

    >>> print(forward_only(Shape(2, num_microbatches=3), devices=[0, 1, 1, 0]))
    d0  0F0 0F1 0F2 3F0 3F1 3F2
    d1  1F0 1F1 1F2 2F0 2F1 2F2

    Source: torch's `_ScheduleForwardOnly`, which knows one stage per device.

    Args:
        shape: the shape; its `stages_per_device` is not used if `devices` is given.
        devices: the device of each stage; when not given, stages go round and round.

    Raises:
        ShapeError: `devices` does not fit `shape.num_devices`.
    """
    if devices and set(devices) != set(range(shape.num_devices)):
        raise ShapeError(
            f"forward-only was given devices={list(devices)} and num_devices="
            f"{shape.num_devices}: each device from 0 to {shape.num_devices - 1} needs "
            "a stage, and there are no others"
        )
    program = shape.chain(devices, trainable=False)

    def order(device: int) -> Iterator[Op]:
        for stage in program.stages_on[device]:
            for microbatch in range(shape.num_microbatches):
                yield Op(Kind.FORWARD, stage, microbatch)

    return repeat_step(program, order)


def _bubble_s(shape: Shape, share: StageCost) -> float:
    p, m, v = shape.num_devices, shape.num_microbatches, shape.stages_per_device
    num_parts = (p - 1) + shape.num_steps * (v - 1) * max(0, p - m)
    return num_parts * share.forward_s / v


def _peak_activations(shape: Shape, device: int) -> float:
    return 1 / shape.stages_per_device


ENTRY: Final = Entry(forward_only, _bubble_s, _peak_activations, looped_num_buffers)
