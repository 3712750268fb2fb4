"""Interleaved zero bubble: interleaved 1F1B with delayed weight gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hocket.core.costs import StageCost
from hocket.core.op import Kind, Op
from hocket.core.schedule import Schedule
from hocket.core.step_end import repeat_step
from hocket.schedules.entry import Entry, Shape
from hocket.schedules.interleaved_1f1b import (
    equal_rounds,
    interleaved,
    peak_activations,
)
from hocket.schedules.zb_h1 import with_weight_grads

_NAME: Final = "interleaved-zb"
STAGES_PER_DEVICE: Final = 2  # the default


def interleaved_zb(shape: Shape) -> Schedule:
    """Split interleaved 1F1B's backwards; device `d` delays `d` weight gradients.

    A later device does its delayed weight gradients while the earlier ones drain.
    Warm-ups differ by one forward from device to device, not by two, because the
    gradient of a stage's input comes back earlier, by the time of a weight gradient.

    Bubble per step: `(p - 1) * (F + I - W) / v` if `W <= F`, `W <= I` and `m >= p`.
    Device `d` holds `(w + 1) / v` units, where `w = (v - 1) * r + p - 1 - d` is its
    warm-up and `r` the length of a round, and never more than `m`.

    >>> print(interleaved_zb(Shape(2, num_microbatches=3, stages_per_device=2)))
    d0  0F0 0F1 0F2 2F0 2F1 2I0 2W0 2F2 2I1 2W1 2I2 2W2 0I0 0W0 0I1 0W1 0I2 0W2 2U 0U
    d1  1F0 1F1 1F2 3F0 3I0 3F1 3I1 3W0 3F2 3I2 3W1 1I0 3W2 1I1 1W0 1I2 1W1 1W2 3U 1U

    Rounds are those of interleaved 1F1B, and so are the numbers of microbatches.

    Source: Qi et al., arXiv:2401.10241, "ZB-1P"; torch's
    `ScheduleInterleavedZeroBubble`.

    Raises:
        ShapeError: the microbatches make no equal rounds.
    """
    rounds = equal_rounds(_NAME, shape)

    def order(device: int) -> Iterator[Op]:
        paired = interleaved(shape, rounds, device, Kind.BACKWARD_INPUT, lead=1)
        return with_weight_grads(paired, num_waiting=device)

    return repeat_step(shape.chain(), order)


def _holds_for(shape: Shape, share: StageCost) -> bool:
    is_short = share.weight_grad_s <= min(share.forward_s, share.input_grad_s)
    return is_short and shape.num_microbatches >= shape.num_devices


def _bubble_s(shape: Shape, share: StageCost) -> float:
    part_s = share.forward_s + share.input_grad_s - share.weight_grad_s
    num_parts = shape.num_steps * (shape.num_devices - 1)
    return num_parts * part_s / shape.stages_per_device


def _num_buffers(shape: Shape) -> int:
    """Return how many messages pile up before a device busy with another stage."""
    p, v = shape.num_devices, shape.stages_per_device
    rounds = equal_rounds(_NAME, shape)
    length = len(rounds[0])
    if p == 1 or v == 1:
        return 1
    if len(rounds) == 1:
        return max(1, length - p)
    return -(-length // 2) if v == STAGES_PER_DEVICE else -(-p // 2) + length - p


ENTRY: Final = Entry(
    interleaved_zb,
    _bubble_s,
    peak_activations(_NAME, lead=1),
    _num_buffers,
    stages_per_device=STAGES_PER_DEVICE,
    holds_for=_holds_for,
)
