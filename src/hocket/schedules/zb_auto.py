"""Search a zero-bubble order for measured times and a memory limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, product
from math import inf
from typing import Final

from hocket.core.costs import Costs, StageCost
from hocket.core.op import Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.core.step_end import close_step
from hocket.core.timelines.timeline import Timeline
from hocket.errors import FitError
from hocket.passes.delay_weight_gradients import (
    delay_weight_gradients,
    too_little_memory,
)
from hocket.schedules.entry import Entry, Shape, equal_times, refuse_several_stages
from hocket.schedules.one_f_one_b import alternate, one_f_one_b
from hocket.schedules.zb_h1 import ENTRY as BY_HAND
from hocket.schedules.zb_h1 import with_weight_grads, zb_h1
from hocket.schedules.zb_h2 import zb_h2

_TINY: Final = 1e-9  # forwards: a sum of seconds may miss a whole number by as much
_TIE: Final = 1e-3


def zb_auto(
    shape: Shape, *, costs: Costs | None = None, memory_bytes: float | None = None
) -> Schedule:
    """Choose the fastest of eight greedy orders, for measured times and a memory limit.

    Each device does as many forwards as fit before its first gradient arrives, then
    one forward, one input gradient, as long as there are forwards; and each W goes
    where it delays nothing, as far as can be known, or where memory is short. Three
    choices are simulated both ways, and the shortest step is taken:

        A   one forward more before the first gradient, even if that has to wait
        B   a W also begins in a gap that is shorter
        C   at the first gradient, a device is only one forward ahead of the next
            device, and not as many as fit

    It is never slower than `1f1b`, `zb-h1` and `zb-h2`, which are tried too, if those
    fit. Of equally short steps it takes the one whose devices are shortest at work,
    from their first op to their last: so much does each further step add, since a
    device begins it when it has ended this one. Of those, it takes the one that holds
    least. With equal times that is ZB-H2, and ZB-H1 in the memory of 1F1B.

    Args:
        shape: a shape with one stage per device.
        costs: the costs of stages and links; when not given, equal times for F, I and
            W, messages that take none, and the memory of 1F1B.
        memory_bytes: the most that each device may hold; unlimited when not given.

    >>> costs = Costs.uniform(weight_grad_s=0.5)
    >>> print(zb_auto(Shape(num_devices=3, num_microbatches=5), costs=costs))
    d0  0F0 0F1 0F2 0I0 0F3 0I1 0F4 0I2 0W0 0W1 0I3 0W2 0W3 0I4 0W4 0U
    d1  1F0 1F1 1I0 1F2 1I1 1F3 1I2 1F4 1I3 1W0 1W1 1I4 1W2 1W3 1W4 1U
    d2  2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4 2U

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, section
    3. There, B decides gap by gap, and C microbatch by microbatch.

    Raises:
        ShapeError: several stages per device.
        CostsError: the costs are of another number of stages.
        FitError: no order holds so little; names the smallest limit that works.
    """
    refuse_several_stages("zb-auto", shape)
    program = replace(shape.chain(), num_steps=1)
    if costs is None:
        costs = Costs.uniform()  # of one byte for each microbatch on its way
        memory_bytes = shape.num_devices if memory_bytes is None else memory_bytes
    limit = inf if memory_bytes is None else memory_bytes
    choices = dict.fromkeys(
        tuple(_fitting(program, costs, warmup, limit))
        for warmup in _warmups(program, costs)
    )
    prompt = [_order(program, warmup) for warmup in choices]
    one = replace(shape, num_steps=1)
    orders = [one_f_one_b(one), zb_h1(one), zb_h2(one)]  # no worse one is chosen
    for order in prompt:
        with suppress(FitError):  # I and W may need more at once than B
            orders.append(delay_weight_gradients(order, costs, memory_bytes=limit))
    timelines = [simulate(order, costs) for order in orders]
    fitting = [timeline for timeline in timelines if timeline.most_bytes <= limit]
    if not fitting:
        raise too_little_memory(
            timelines + [simulate(order, costs) for order in prompt],
            limit,
            "in the order that takes least",
            "more microbatches, recomputation or more devices need less",
            prefix="zb-auto: ",
        )
    return _chosen(fitting).schedule.with_num_steps(shape.num_steps)


def _warmups(program: Program, costs: Costs) -> Iterator[list[int]]:
    """Yield each device's forwards before its first pair: choices A and C."""
    first = _forwards_that_fit(program, costs)
    for one_more, one_ahead in product((False, True), repeat=2):
        warmup = [0] * program.num_devices
        for device in reversed(range(program.num_devices - 1)):
            least = warmup[device + 1] + 1
            fit = least if one_ahead else max(least, first[device] - 1)
            warmup[device] = fit
        yield [number + one_more for number in warmup]


def _forwards_that_fit(program: Program, costs: Costs) -> list[int]:
    """Return the forwards that end on each device before its first gradient arrives.

    d0  F F F F F         their pace is that of the slowest device up to here
    d1    F F F   I
    d2      F I
    └──┘ begins    └┘ arrives
    """
    stages = costs.of(program)
    devices = range(program.num_devices)
    there_s = [_message_s(costs, stages[d], d, d + 1) for d in devices[:-1]]
    back_s = [_message_s(costs, stages[d], d, d - 1) for d in devices[1:]]
    forward_s = [cost.forward_s for cost in stages]
    begin_s = list(
        accumulate(map(sum, zip(forward_s, there_s, strict=False)), initial=0.0)
    )
    turn_s = begin_s[-1] + forward_s[-1]
    grads_s = [
        stages[d].seconds(Kind.BACKWARD_INPUT) + back_s[d - 1] for d in devices[1:]
    ]
    way_back_s = [sum(grads_s[device:]) for device in devices]
    pace_s = accumulate(forward_s, max)
    return [
        int((turn_s + back - begin) / pace + _TINY) if pace > 0 else 1
        for begin, back, pace in zip(begin_s, way_back_s, pace_s, strict=True)
    ]


def _message_s(costs: Costs, cost: StageCost, source: int, target: int) -> float:
    num_bytes = cost.output_bytes if source < target else cost.input_grad_bytes
    return costs.link_between(source, target).message_s(num_bytes)


def _order(program: Program, warmup: Sequence[int]) -> Schedule:
    """Return one step in which no W waits."""

    def lane(device: int) -> Iterator[Op]:
        microbatches = range(program.num_microbatches_of(device))
        pairs = alternate(
            [Op(Kind.FORWARD, device, i) for i in microbatches],
            [Op(Kind.BACKWARD_INPUT, device, i) for i in microbatches],
            num_warmup=warmup[device],
        )
        return with_weight_grads(pairs, num_waiting=0)

    lanes = (close_step(program, d, lane(d)) for d in range(program.num_devices))
    return Schedule(program, tuple(lanes))


def _fitting(
    program: Program, costs: Costs, warmup: Sequence[int], limit: float
) -> list[int]:
    """Return the warm-up, shortened to keep to the limit if that is possible."""
    num_microbatches = program.num_microbatches_of(0)
    fitting = [min(number, num_microbatches) for number in warmup]
    while True:
        timeline = simulate(_order(program, fitting), costs)
        if timeline.most_bytes <= limit:
            return fitting
        fullest = max(range(program.num_devices), key=timeline.peak_bytes)
        # What lies with a device may be what those before it have sent too early.
        shorter = next((d for d in range(fullest, -1, -1) if fitting[d]), None)
        if shorter is None:
            return fitting
        fitting[shorter] -= 1
        fitting = list(accumulate(fitting, min))  # or a device would wait for ever


def _chosen(timelines: Sequence[Timeline]) -> Timeline:
    """Choose the shortest step; of ties, the shortest device; then the fewest bytes.

    What differs by less than a thousandth is a tie: no time is known better, and an
    order that wins so little may hold several times as much.
    """
    steps_s = [timeline.makespan_s for timeline in timelines]
    short = [timelines[i] for i in _least(steps_s)]
    brief = [short[i] for i in _least([_taken_s(timeline) for timeline in short])]
    return min(brief, key=lambda timeline: timeline.most_bytes)


def _least(seconds: Sequence[float]) -> list[int]:
    """Return the places of the shortest, and of what ties with it."""
    most = (1 + _TIE) * min(seconds)
    return [i for i, value in enumerate(seconds) if value <= most]


def _taken_s(timeline: Timeline) -> float:
    """Return the longest time from a device's first op to its last."""
    lanes = zip(timeline.start_s, timeline.end_s, strict=True)
    return max(float(ends[-1] - starts[0]) for starts, ends in lanes)


ENTRY: Final = Entry(
    zb_auto,
    BY_HAND.bubble_s,
    BY_HAND.peak_activations,
    holds_for=equal_times,
)
