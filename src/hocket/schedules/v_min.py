"""V-Min: a third of 1F1B's activations, for about two thirds of its bubble."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from warnings import warn

from hocket.core.costs import Costs, StageCost
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.schedules.building_block import Block, block, peak_of, squeezed
from hocket.schedules.entry import Entry, Shape, equal_times, microbatch_s
from hocket.schedules.v_half import v_half
from hocket.schedules.v_shape import STAGES_PER_DEVICE
from hocket.schedules.zb_v import zb_v

_NOTHING: Final = 0.01  # of a microbatch's work: so little is not worth a warning
_ROUNDING: Final = 1e-9


class RepeatingBubbleWarning(UserWarning):
    """A bubble that comes back with every microbatch."""


def v_min(shape: Shape, *, share: StageCost | None = None) -> Schedule:
    """Hold a third of 1F1B's activations on every device, for two thirds of its bubble.

    Bubble per step: `(4p - 5) * F / 2`, and two slots less where three divides `p`, if
    `F = I = W` and `m >= 2`. No device holds more than `(p + 4) / 3` units, not even
    until W.

    >>> print(v_min(Shape(2, num_microbatches=3, stages_per_device=2)))
    d0  0F0 0F1 3F0 3I0 3W0 0I0 0W0 3F1 3I1 0F2 3W1 0I1 0W1 3F2 3I2 3W2 0I2 0W2 3U 0U
    d1  1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2 2U 1U

    Neighbouring devices follow each other so closely that none has other work while it
    waits. So the times must be nearly equal: if they are not, a bubble repeats with
    every microbatch. If `share` is given, a warning says so.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory",
    arXiv:2405.15362 (NeurIPS'24); the squeeze is our own, see `building_block`.

    Args:
        shape: a shape with two stages per device.
        share: the measured times of a microbatch in a device's whole share of the
            model.

    Raises:
        ShapeError: not two stages per device.

    Warns:
        RepeatingBubbleWarning: with `share`, if the bubble repeats; with the numbers.
    """
    text = "" if share is None else repeating_bubble(shape.num_devices, share)
    if text:
        warn(text, RepeatingBubbleWarning, stacklevel=3)  # make_schedule's caller
    return squeezed("v-min", shape, block_of)


def block_of(shape: Shape, device: int) -> Block:
    """Return a device's block.

    Forwards and backwards go down and up in every slot.
    Where three divides the devices the backwards begin two slots later, because they
    would stand in the forwards' slots.
    """
    p, d = shape.num_devices, device
    later = 0 if p % 3 else 2
    starts = d, 2 * p - 1 - d, 2 * p + later + d, 4 * p - 1 + later - d
    return block(shape, device, starts)


def repeating_bubble_s(
    make: Callable[[Shape], Schedule], num_devices: int, share: StageCost
) -> float:
    """Return how much longer than its work each further microbatch takes.

    Args:
        make: makes a schedule with two stages per device.
        num_devices: the devices of one replica.
        share: what a microbatch takes in a device's whole share of the model.
    """
    few, many = 2 * num_devices, 4 * num_devices
    costs = Costs((share,), is_device_share=True)
    few_s, many_s = (
        simulate(make(Shape(num_devices, m, STAGES_PER_DEVICE)), costs).makespan_s
        for m in (few, many)
    )
    work_s = microbatch_s(share)
    bubble_s = (many_s - few_s) / (many - few) - work_s
    return bubble_s if bubble_s > _ROUNDING * work_s else 0.0


def repeating_bubble(num_devices: int, share: StageCost) -> str:
    """Return advice if V-Min repeats a bubble with these times; else nothing.

    Args:
        num_devices: the devices of one replica.
        share: what a microbatch takes in a device's whole share of the model.
    """
    more = "half as many activations more"
    return _advice((v_min, "v-min"), (v_half, "v-half"), more, num_devices, share)


def repeating_bubble_of_v_half(num_devices: int, share: StageCost) -> str:
    """Return advice if V-Half repeats a bubble with these times; else nothing."""
    more = "up to twice as many activations"
    return _advice((v_half, "v-half"), (zb_v, "zb-v"), more, num_devices, share)


def _advice(
    taken: tuple[Callable[[Shape], Schedule], str],
    other: tuple[Callable[[Shape], Schedule], str],
    more: str,
    num_devices: int,
    share: StageCost,
) -> str:
    """Say that one order repeats a bubble, and which to take instead, at what price."""
    (make, name), (make_other, other_name) = taken, other
    work_s = microbatch_s(share)
    bubble_s = repeating_bubble_s(make, num_devices, share)
    if bubble_s <= _NOTHING * work_s:
        return ""
    other_s = repeating_bubble_s(make_other, num_devices, share)
    return (
        f"{name} repeats a bubble of {bubble_s:.3g} s ({100 * bubble_s / work_s:.3g} % "
        f"of the work) with every microbatch on {num_devices} devices, since forward "
        f"({share.forward_s:.3g} s), input gradient ({share.input_grad_s:.3g} s) and "
        f"weight gradient ({share.weight_grad_s:.3g} s) are not equally long. Take "
        f"{other_name}, which repeats {other_s:.3g} s, and holds {more}."
    )


def _bubble_s(shape: Shape, share: StageCost) -> float:
    p, m = shape.num_devices, shape.num_microbatches
    is_later = p % 3 == 0 and m > 1
    waits = max(0, 4 * p - 5 - 2 * is_later)
    return shape.num_steps * waits * share.forward_s / 2


ENTRY: Final = Entry(
    v_min,
    _bubble_s,
    peak_of(block_of),
    stages_per_device=STAGES_PER_DEVICE,
    holds_for=equal_times,
)
