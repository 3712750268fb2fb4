"""ZB-H2: twice ZB-H1's warm-up, and no bubble left between steps."""

from __future__ import annotations

from functools import partial
from typing import Final

from hocket.core.costs import StageCost
from hocket.core.schedule import Schedule
from hocket.schedules.entry import (
    Entry,
    Shape,
    refuse_several_stages,
    warmup_microbatches,
)
from hocket.schedules.zb_h1 import lagging, lagging_bubble_s


def zb_h2(shape: Shape) -> Schedule:
    """Leave no bubble between steps, for nearly twice the activations of 1F1B.

    ZB-H1 with twice as many forwards to warm up, which fill the wait for the first
    gradient, and with weight gradients that lag twice as far behind.

    Bubble: the filling of the pipeline, `(p - 1) * F`, once; and with each further step
    `(p - 1) * (F + I - 2 * W)`, from `2 * p - 1` microbatches on and if W is no longer
    than F: nothing where F, I and W are equal, since each device begins its next
    step as soon as it has ended this one. Where all devices wait for each other at the
    end of a step, as they must for the norm of all gradients, the filling comes back
    with every step. Device `d` never holds more than `2 * (p - d) - 1` microbatches,
    and of `2 * d` further ones what their W needs.

    >>> print(zb_h2(Shape(num_devices=3, num_microbatches=6)))
    d0  0F0 0F1 0F2 0F3 0F4 0I0 0W0 0F5 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5 0U
    d1  1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1F5 1I3 1W1 1I4 1W2 1I5 1W3 1W4 1W5 1U
    d2  2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2F5 2I5 2W1 2W2 2W3 2W4 2W5 2U

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, section
    2.2 and Fig. 3, bottom.

    Raises:
        ShapeError: several stages per device.
    """
    refuse_several_stages("zb-h2", shape)
    return lagging(shape, lead=2)


def _holds_for(shape: Shape, share: StageCost) -> bool:
    is_full = shape.num_microbatches >= 2 * shape.num_devices - 1
    return is_full or share.weight_grad_s <= min(share.forward_s, share.input_grad_s)


ENTRY: Final = Entry(
    zb_h2,
    partial(lagging_bubble_s, lead=2),
    partial(warmup_microbatches, lead=2),
    holds_for=_holds_for,
)
