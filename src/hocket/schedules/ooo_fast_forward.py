"""Gradient fast-forwarding: send input gradients first, and fill holes with W."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from hocket.core.costs import StageCost
from hocket.core.op import Kind, Op
from hocket.core.schedule import Schedule
from hocket.core.step_end import repeat_step
from hocket.schedules.entry import (
    Entry,
    Shape,
    equal_times,
    refuse_several_stages,
    warmup_microbatches,
)
from hocket.schedules.one_f_one_b import alternate
from hocket.schedules.zb_h1 import lagging


def ooo_fast_forward(shape: Shape, *, push: bool = False) -> Schedule:
    """Send each input gradient at once, and compute weight gradients in the holes.

    The first published use of split backwards in a pipeline, in the words of its
    authors "out-of-order backprop". Forwards and inputs' gradients alternate until no
    forward is left; then weights' gradients take the forwards' places.

    Bubble per step: `(p - 1) * F` if `F = I = W` and `m >= p`, a third of GPipe's; each
    microbatch that is missing to `p` costs as much again. Device `d` holds
    `2 * (p - d) - 1` microbatches, and what the weights' gradients need of all.

    >>> print(ooo_fast_forward(Shape(num_devices=3, num_microbatches=4)))
    d0  0F0 0F1 0F2 0F3 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0U
    d1  1F0 1F1 1F2 1I0 1F3 1I1 1I2 1W0 1I3 1W1 1W2 1W3 1U
    d2  2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2W0 2W1 2W2 2W3 2U

    For many microbatches, `push` lets no more than `p` of them be on a device between F
    and W. That is the order that was published again as ZB-H1:

    >>> print(ooo_fast_forward(Shape(num_devices=3, num_microbatches=4), push=True))
    d0  0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3 0U
    d1  1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3 1U
    d2  2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3 2U

    Source: Oh et al., "Out-Of-Order BackProp", EuroSys'22, doi 10.1145/3492321.3519563.
    Its artifact leaves most of the order to TensorFlow's executor. Of its control edges
    two are not kept here, because they make a step longer: that each W goes before the
    next microbatch's I, and that `push` lets stage `s` hold only `p - s` microbatches
    between F and W.

    Args:
        shape: with one stage per device.
        push: at most `p` microbatches between F and W on a device.

    Raises:
        ShapeError: several stages per device.
    """
    refuse_several_stages("ooo-fast-forward", shape)
    if push:
        return lagging(shape, lead=1)
    return repeat_step(shape.chain(), lambda device: fast_forward(shape, device))


def fast_forward(shape: Shape, device: int) -> Iterator[Op]:
    """Yield one device's ops, for stages that go round and round the devices.

        F F F F │ F I  F I  F I │ I W  I W  I W  I W │ W W W
        warm-up   while there      while there is       what
                  is an F          an I                 is left

    Args:
        shape: all microbatches of one stage go before the next.
        device: whose ops.
    """
    m, v = shape.num_microbatches, shape.stages_per_device
    stages = range(device, shape.num_stages, shape.num_devices)
    forwards = [Op(Kind.FORWARD, s, i) for s in stages for i in range(m)]
    inputs = [Op(Kind.BACKWARD_INPUT, s, i) for s in stages[::-1] for i in range(m)]
    weights = [Op(Kind.BACKWARD_WEIGHT, s, i) for s in stages[::-1] for i in range(m)]
    num_warmup = (v - 1) * m + min(m, 2 * (shape.num_devices - 1 - device))
    num_pairs = len(forwards) - num_warmup
    yield from alternate(forwards, inputs[:num_pairs], num_warmup=num_warmup)
    for input_grad, weight_grad in zip(inputs[num_pairs:], weights, strict=False):
        yield input_grad
        yield weight_grad
    yield from weights[num_warmup:]


def fast_forward_bubble_s(shape: Shape, share: StageCost) -> float:
    """Return the bubble of `fast_forward`, over all steps, for equal F, I and W.

    The way of the first forward, once; and in every step what device 0 waits for its
    first gradient, if too few forwards fill that. At least one slot is lost, when the
    last gradients have no forwards to alternate with.
    """
    p, m = shape.num_devices, shape.num_microbatches
    waits = max(2 * p - 1 - m, min(1, p - 1))
    num_slots = max(p - 1, waits) + (shape.num_steps - 1) * waits
    return num_slots * share.forward_s / shape.stages_per_device


def enough(shape: Shape, share: StageCost) -> bool:
    """Return whether F, I and W are equal, and there are `p` microbatches or more."""
    return equal_times(shape, share) and shape.num_microbatches >= shape.num_devices


ENTRY: Final = Entry(
    ooo_fast_forward,
    fast_forward_bubble_s,
    partial(warmup_microbatches, lead=2),
    holds_for=equal_times,
)
