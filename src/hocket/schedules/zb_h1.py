"""ZB-H1: 1F1B in which weight gradients wait until there is nothing else to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Final

from hocket.core.costs import StageCost
from hocket.core.op import Kind, Op
from hocket.core.schedule import Schedule
from hocket.core.step_end import repeat_step
from hocket.schedules.entry import (
    Entry,
    Shape,
    refuse_several_stages,
    warmup_microbatches,
)
from hocket.schedules.one_f_one_b import alternate


def zb_h1(shape: Shape) -> Schedule:
    """Delay weight gradients: 1F1B's activations, and a third of its bubble.

    The order of 1F1B with I in the place of B; on device `d`, each W stands `d`
    microbatches behind its I. So the gradient of the input is with the device before
    sooner, and what waited fills the end of the step.

    Bubble per step: `(p - 1) * (F + I - W)`, from `p` microbatches on and if W is no
    longer than F and I. Device `d` never holds more than `p - d` microbatches, and of
    `d` further ones what their W needs.

    >>> print(zb_h1(Shape(num_devices=3, num_microbatches=4)))
    d0  0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3 0U
    d1  1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3 1U
    d2  2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3 2U

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, section
    2.1 and Fig. 3, top; torch's `ScheduleInterleavedZeroBubble` with one stage per
    device.

    Raises:
        ShapeError: several stages per device.
    """
    refuse_several_stages("zb-h1", shape)
    return lagging(shape, lead=1)


def lagging(shape: Shape, *, lead: int) -> Schedule:
    """Run 1F1B with another warm-up, and with weight gradients that lag behind.

    Device `d` does `lead * (p - 1 - d)` forwards to warm up, and each of its W stands
    `lead * d` microbatches behind its I: together the same on every device.

    Args:
        shape: with one stage per device.
        lead: by how many forwards neighbours differ.
    """

    def order(device: int) -> Iterator[Op]:
        microbatches = range(shape.num_microbatches)
        ops = alternate(
            [Op(Kind.FORWARD, device, microbatch) for microbatch in microbatches],
            [Op(Kind.BACKWARD_INPUT, device, i) for i in microbatches],
            num_warmup=lead * (shape.num_devices - 1 - device),
        )
        return with_weight_grads(ops, num_waiting=lead * device)

    return repeat_step(shape.chain(), order)


def with_weight_grads(ops: Iterable[Op], *, num_waiting: int) -> Iterator[Op]:
    """Yield after each I the oldest W, once more than `num_waiting` wait."""
    waiting: deque[Op] = deque()
    for op in ops:
        yield op
        if op.kind is Kind.BACKWARD_INPUT:
            waiting.append(op.as_kind(Kind.BACKWARD_WEIGHT))
            if len(waiting) > num_waiting:
                yield waiting.popleft()
    yield from waiting


def lagging_bubble_s(shape: Shape, share: StageCost, *, lead: int) -> float:
    """Return the bubble of `lagging`, over all steps, for any F, I and W.

    Every device `d` gives two bounds, and the longest of all is what happens:

        F ──▶ last device ──▶ I           before its first I, device d has done the
        d: F F F  .  .  .  .  I           forwards of its warm-up, and nothing else
        last device: ... I W W W          after the last I of the last device, there are
              d: I ◀──┘  I W              fewer W left on device d than on that one

    Device `d` waits `d * F` of that for the first forward. From the second step on it
    does not: device 0 has gone on while the others ended. With a lead of 2 and fewer
    than `2 * p - 1` microbatches, a W that is longer than F or I gets in their way.
    """
    p, m = shape.num_devices, shape.num_microbatches

    def waits_s(device: int) -> float:
        way = p - 1 - device
        num_before = min(m, lead * way + 1)
        num_after = min(m, lead * (p - 1) + 1) - min(m, lead * device + 1)
        done_s = (num_before - 1) * share.forward_s
        filled_s = min(done_s, num_after * share.weight_grad_s)
        return (p - 1) * share.forward_s + way * share.input_grad_s - filled_s

    first_s = max(waits_s(device) for device in range(p))
    again_s = max(waits_s(device) - device * share.forward_s for device in range(p))
    return first_s + (shape.num_steps - 1) * again_s


ENTRY: Final = Entry(zb_h1, partial(lagging_bubble_s, lead=1), warmup_microbatches)
