"""ZB-V: two stages per device in a V, and weight gradients in every hole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hocket.core.costs import StageCost
from hocket.core.op import Kind
from hocket.core.schedule import Schedule
from hocket.core.step_end import repeat_step
from hocket.schedules.entry import Entry, Shape, equal_times
from hocket.schedules.v_shape import (
    STAGES_PER_DEVICE,
    Move,
    numbered,
    stages_of,
    v_chain,
)


def zb_v(shape: Shape) -> Schedule:
    """Keep every device busy from its first op to its last, in the memory of 1F1B.

    The stages lie in a V: the device that begins the net ends it too, so that its first
    backwards need no message. Backwards are split, and no device waits between its ops.

    Bubble: `(p - 1) * F / 2`, the way of the first forward, once, if `F = I = W` and
    `m >= 2p - 1`; each step begins where the one before leaves off. Every device holds
    `p` units, as the fullest of 1F1B does, and sends twice as many messages.

    >>> print(zb_v(Shape(2, num_microbatches=3, stages_per_device=2)))
    d0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 3U 0U
    d1  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2 2U 1U

    With fewer than `2p - 1` microbatches each that is missing leaves a hole of `F`.

    Source: Qi et al., arXiv:2401.10241, section 6; torch's `ScheduleZBVZeroBubble`.

    Raises:
        ShapeError: not two stages per device.
    """
    program = v_chain("zb-v", shape)
    return repeat_step(
        program,
        lambda device: numbered(_moves(shape, device), shape.num_microbatches),
    )


def _moves(shape: Shape, device: int) -> Iterator[Move]:
    """Yield a device's moves in turn.

    F0 I0 W0 are of its stage on the way down, F1 I1 W1 of that on the way up.
    """
    p, num_before, num_after = shape.num_devices, device, shape.num_devices - device
    num = max(shape.num_microbatches, 2 * p - 1)
    down, up = stages_of(shape, device)
    f0, i0, w0 = ((kind, down) for kind in _KINDS)
    f1, i1, w1 = ((kind, up) for kind in _KINDS)
    # warm up: down, then down and up, then the first backwards near the loss
    yield from [f0] * (2 * num_after - 1)
    yield from [f1, f0] * num_before
    yield from [f1, i1, w1] * num_after
    # one forward and one backward of each stage; at last no forward down is left
    num_full = num - 2 * p + 1 + num_before
    yield from [f0, i0, w0, f1, i1, w1] * num_full
    yield from [i0, w0, f1, i1, w1] * (num - p - num_full)
    # cool down: first the gradients that other devices wait for
    yield from [i0, i1] * num_before
    yield from [i0, w0] * num_after
    yield from [w1] * num_before
    yield from [w0] * num_before


_KINDS: Final = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def _bubble_s(shape: Shape, share: StageCost) -> float:
    """Return the first forward's way, once, and the holes of missing microbatches.

    Each step begins where the one before leaves off, but for what is missing.
    """
    p, m, n = shape.num_devices, shape.num_microbatches, shape.num_steps
    missing = 2 * max(0, 2 * p - 1 - m)
    return (max(p - 1, missing) + (n - 1) * missing) * share.forward_s / 2


def _peak_activations(shape: Shape, device: int) -> float:
    p, m = shape.num_devices, shape.num_microbatches
    return (min(m, 2 * p - 1 - device) + min(m, device + 1)) / 2


ENTRY: Final = Entry(
    zb_v,
    _bubble_s,
    _peak_activations,
    stages_per_device=STAGES_PER_DEVICE,
    holds_for=equal_times,
)
