"""V-Half: half of 1F1B's activations, for about half of its bubble."""

from __future__ import annotations

from typing import Final

from hocket.core.costs import StageCost
from hocket.core.schedule import Schedule
from hocket.schedules.building_block import Block, block, peak_of, squeezed
from hocket.schedules.entry import Entry, Shape, equal_times
from hocket.schedules.v_shape import STAGES_PER_DEVICE


def v_half(shape: Shape) -> Schedule:
    """Hold half of 1F1B's activations on every device, for about half of its bubble.

    Bubble per step: `(3p - 4) * F / 2` with an odd number of devices, and three slots
    of `F / 2` less with an even one from 4 on, if `F = I = W` and `m >= p`. No device
    holds more than `(p + 2) / 2` units, not even until W. Times need not be equal: the
    bubble does not repeat while `W + 2I >= 2F` and `W + 2F >= 2I`.

    >>> print(v_half(Shape(2, num_microbatches=3, stages_per_device=2)))
    d0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2 3U 0U
    d1  1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 1F2 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2 2U 1U

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory",
    arXiv:2405.15362 (NeurIPS'24); the squeeze is our own, see `building_block`.

    Raises:
        ShapeError: not two stages per device.
    """
    return squeezed("v-half", shape, block_of)


def block_of(shape: Shape, device: int) -> Block:
    """Return a device's block.

    Forwards go down in every second slot and up in every slot, and so do backwards.
    With an even number of devices the backwards begin three slots later, because they
    would stand in the forwards' slots.
    """
    p, d = shape.num_devices, device
    later = 0 if p % 2 else 3
    starts = 2 * d, 3 * p - 2 - d, 3 * p - 1 + later + 2 * d, 6 * p - 2 + later - d
    return block(shape, device, starts)


def _bubble_s(shape: Shape, share: StageCost) -> float:
    """Return what each step waits, and at least once the way of the first forward."""
    p, m, n = shape.num_devices, shape.num_microbatches, shape.num_steps
    if p % 2:
        waits = max(3 * p - 4, 4 * p - 4 - m, 0)
    else:
        waits = max(3 * p - 7, 4 * p - 3 - 2 * m, 0)
    return (max(p - 1, waits) + (n - 1) * waits) * share.forward_s / 2


ENTRY: Final = Entry(
    v_half,
    _bubble_s,
    peak_of(block_of),
    stages_per_device=STAGES_PER_DEVICE,
    holds_for=equal_times,
)
