"""Chimera: two copies of the net, whose microbatches go in opposite directions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hocket.core.costs import StageCost
from hocket.core.op import Op
from hocket.core.program import Net, Program, Stage
from hocket.core.schedule import Schedule
from hocket.core.step_end import repeat_step
from hocket.errors import ShapeError
from hocket.schedules.entry import Entry, Shape
from hocket.schedules.hanayo import refuse_broken_rounds, wave_bubble_s, wave_order

STAGES_PER_DEVICE: Final = 2  # one of each copy


def chimera(shape: Shape) -> Schedule:
    """Fill one direction's bubbles with the other direction's work.

    There are two nets, `down` and `up`: copies of one, of which each device has two
    stages. Half of the microbatches go down the devices and half go up.

        down   0 ─▶ 1 ─▶ 2 ─▶ 3          device   0    1    2    3
          up   7 ◀─ 6 ◀─ 5 ◀─ 4

    A device's share is its two stages, one of each copy. Bubble per step: `(p / 2 - 1)
    * max(F, B)` for one round of `p` microbatches, and `(p / 2 - 1) * |B - F|` for each
    further one. Device `d` holds `(p / 2 + min(d + 1, p - d)) / 2` units, and twice the
    weights.

    >>> print(chimera(Shape(2, num_microbatches=2, stages_per_device=2)))
    steps 1
    replicas 1
    net down microbatches=1
    net up microbatches=1
    stage 0 net=down device=0
    stage 1 net=down device=1
    stage 2 net=up device=1
    stage 3 net=up device=0
    flow 0>1
    flow 2>3
    copies 0 2
    copies 1 3
    d0  0F0 3F0 3B0 3R 0B0 0R 3U 0U
    d1  2F0 1F0 1B0 1R 2B0 2R 1U 2U

    R adds up the gradients of the two copies of a stage, from device to mirrored
    device, as soon as they are complete.

    Source: Li and Hoefler, "Chimera", arXiv:2107.06925 (SC'21); several rounds follow
    each other by its "direct concatenation".

    Raises:
        ShapeError: an odd number of devices, not two stages per device, or microbatches
            that make no whole rounds.
    """
    p = shape.num_devices
    if p % 2:
        raise ShapeError(
            f"chimera needs an even number of devices, got num_devices={p}: use "
            + (f"{p - 1} or {p + 1}" if p > 1 else "2")
        )
    if shape.stages_per_device != STAGES_PER_DEVICE:
        raise ShapeError(
            f"chimera puts one stage of each copy on each device, got "
            f"stages_per_device={shape.stages_per_device}: use 2"
        )
    refuse_broken_rounds("chimera", shape)
    program = _program(shape)

    def order(device: int) -> Iterator[Op]:
        down, up = program.stages_on[device]
        num_microbatches = program.num_microbatches_of(down)
        places = {down: device, up: p - 1 - device}
        return wave_order(places, p, p // 2, num_microbatches)

    return repeat_step(program, order)


def _program(shape: Shape) -> Program:
    devices = range(shape.num_devices)
    num_down = shape.num_devices
    return Program(
        nets=tuple(Net(name, shape.num_microbatches // 2) for name in ("down", "up")),
        stages=(
            *(Stage("down", device) for device in devices),
            *(Stage("up", device) for device in reversed(devices)),
        ),
        flows=tuple((s, s + 1) for s in range(2 * num_down - 1) if s != num_down - 1),
        num_steps=shape.num_steps,
        num_replicas=shape.num_replicas,
        copies=tuple((stage, num_down + stage) for stage in range(num_down)),
    )


def _bubble_s(shape: Shape, share: StageCost) -> float:
    num_hops = shape.num_devices // 2 - 1
    return wave_bubble_s(shape, share, num_hops) / STAGES_PER_DEVICE


def _peak_activations(shape: Shape, device: int) -> float:
    p = shape.num_devices
    return (p // 2 + min(device + 1, p - device)) / 2


ENTRY: Final = Entry(
    chimera,
    _bubble_s,
    _peak_activations,
    stages_per_device=STAGES_PER_DEVICE,
)
