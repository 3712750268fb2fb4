"""Modulo allocation: deal out layers round and round, and fast-forward gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from hocket.core.costs import Costs, Link, StageCost
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.core.step_end import repeat_step
from hocket.errors import ShapeError
from hocket.schedules.entry import Entry, Shape, warmup_microbatches
from hocket.schedules.ooo_fast_forward import (
    enough,
    fast_forward,
    fast_forward_bubble_s,
)

_AS_FAST: Final = 1e-9  # of a step: such a difference is none


def ooo_modulo(shape: Shape) -> Schedule:
    """Deal out single layers, or small groups of them, round and round the devices.

    Group `g` of the layers is on device `g % p`, so that a device waits only for the
    first group of those before, not for their whole shares. The order is that of
    `ooo-fast-forward`, all microbatches of one group before the next. Messages grow
    with the number of groups: `group_size` chooses for a link.

    Bubble per step: `(p - 1) * F / v` if `F = I = W` and `m >= p`.

    >>> print(ooo_modulo(Shape(2, num_microbatches=3, stages_per_device=2)))
    d0  0F0 0F1 0F2 2F0 2F1 2F2 2I0 2I1 2W0 2I2 2W1 0I0 2W2 0I1 0W0 0I2 0W1 0W2 2U 0U
    d1  1F0 1F1 1F2 3F0 3I0 3F1 3I1 3F2 3I2 1I0 3W0 1I1 3W1 1I2 3W2 1W0 1W1 1W2 3U 1U

    Source: Oh et al., "Out-Of-Order BackProp", EuroSys'22, doi 10.1145/3492321.3519563,
    "modulo layer allocation"; its artifact takes groups of two and more for slow links.
    """
    return repeat_step(shape.chain(), lambda device: fast_forward(shape, device))


def group_size(
    num_layers: int,
    num_devices: int,
    num_microbatches: int,
    *,
    layer: StageCost,
    link: Link,
) -> int:
    """Return how many consecutive layers go to one device, for the shortest step.

    Single layers make the shortest bubble, and the most messages: each size that deals
    the layers out evenly is simulated. Of equals, the larger group sends less.

    Args:
        num_layers: alike.
        num_devices: `p`.
        num_microbatches: per step.
        layer: what one layer costs.
        link: between any two devices.

    Raises:
        ShapeError: the layers cannot be dealt out evenly.
    """
    if num_layers % num_devices:
        below = num_layers - num_layers % num_devices
        choice = f"{below} or {below + num_devices}" if below else f"{num_devices}"
        raise ShapeError(
            f"num_layers={num_layers} cannot be dealt out evenly to num_devices="
            f"{num_devices}: use {choice} layers"
        )
    most = num_layers // num_devices

    def step_s(size: int) -> float:
        shape = Shape(num_devices, num_microbatches, most // size)
        costs = Costs((_together(layer, size),) * shape.num_stages, link=link)
        return simulate(ooo_modulo(shape), costs).makespan_s

    sizes = [size for size in range(1, most + 1) if most % size == 0]
    steps_s = {size: step_s(size) for size in sizes}
    enough_s = min(steps_s.values()) * (1 + _AS_FAST)
    return max(size for size in sizes if steps_s[size] <= enough_s)


def _together(layer: StageCost, size: int) -> StageCost:
    """Return the cost of consecutive layers on one device, with one's messages."""
    return replace(
        layer,
        forward_s=size * layer.forward_s,
        input_grad_s=size * layer.input_grad_s,
        weight_grad_s=size * layer.weight_grad_s,
        update_s=size * layer.update_s,
        split_s=size * layer.split_s,
    )


def _peak_activations(shape: Shape, device: int) -> float:
    m, v = shape.num_microbatches, shape.stages_per_device
    return ((v - 1) * m + warmup_microbatches(shape, device, lead=2)) / v


def _num_buffers(shape: Shape) -> int:
    """Return what the last device sends back while the first does forwards."""
    p, m = shape.num_devices, shape.num_microbatches
    if p == 1 or shape.stages_per_device == 1 or m < 2 * p:
        return 1
    return max(2, m - 2 * p + 1)


ENTRY: Final = Entry(
    ooo_modulo,
    fast_forward_bubble_s,
    _peak_activations,
    _num_buffers,
    stages_per_device=2,
    holds_for=enough,
)
