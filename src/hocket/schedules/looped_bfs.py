"""Looped breadth-first: several stages per device, and all of one before the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hocket.core.costs import StageCost
from hocket.core.op import Kind, Op
from hocket.core.schedule import Schedule
from hocket.core.step_end import repeat_step
from hocket.schedules.entry import Entry, Shape, all_microbatches, microbatch_s


def looped_bfs(shape: Shape) -> Schedule:
    """Run all microbatches of a stage before the next, for a `v` times smaller bubble.

    Stage `s` lives on device `s % p`. Forwards go through a device's stages in order,
    backwards in reverse, and from the last microbatch to the first.

    Bubble per step: `(p - 1) * (F + B) / v`, if `m >= p`; with fewer microbatches each
    further stage waits for `p - m` more. Every device holds all `m` microbatches. In
    return each stage's gradients are complete early and at one stroke, so that they are
    reduced, and with sharded weights these are gathered, once per step and overlapped.

    >>> print(looped_bfs(Shape(2, num_microbatches=3, stages_per_device=2)))
    d0  0F0 0F1 0F2 2F0 2F1 2F2 2B2 2B1 2B0 0B2 0B1 0B0 2U 0U
    d1  1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0 3U 1U

    Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism", arXiv:2211.05953;
    torch's `ScheduleLoopedBFS`.
    """
    microbatches = range(shape.num_microbatches)

    def order(device: int) -> Iterator[Op]:
        stages = range(device, shape.num_stages, shape.num_devices)
        for stage in stages:
            for microbatch in microbatches:
                yield Op(Kind.FORWARD, stage, microbatch)
        for stage in reversed(stages):
            for microbatch in reversed(microbatches):
                yield Op(Kind.BACKWARD, stage, microbatch)

    return repeat_step(shape.chain(), order)


def looped_bubble_s(shape: Shape, share: StageCost) -> float:
    """Return the bubble of looped stages, over all steps.

        m >= p      0F0 0F1 0F2 2F0 2F1 2F2     a full round keeps the device busy
        m <  p      0F0  .   .  2F0  .   .      ... and a short one leaves `p - m` idle

    Such holes are there once between each two stages of a device, and the filling of
    the pipeline costs `p - 1` parts of `(F + B) / v` on top.
    """
    p, m, v = shape.num_devices, shape.num_microbatches, shape.stages_per_device
    num_parts = (p - 1) + (v - 1) * max(0, p - m)
    return shape.num_steps * num_parts * microbatch_s(share) / v


def looped_num_buffers(shape: Shape) -> int:
    """Return the receive buffers of orders that finish one stage before the next.

    While device 0 works off its first stage, the last device's outputs for its second
    one wait. They wait in buffers, or in the devices between, one in each.
    """
    if shape.num_devices == 1 or shape.stages_per_device == 1:
        return 1
    return max(1, shape.num_microbatches // shape.num_devices)


ENTRY: Final = Entry(
    looped_bfs,
    looped_bubble_s,
    all_microbatches,
    looped_num_buffers,
    stages_per_device=2,
)
