"""Delay weight gradients until a lane has no other work: out-of-order backprop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Final

from hocket.core.costs import Costs
from hocket.core.op import MESSAGES, Kind, Op
from hocket.core.schedule import Lane, Schedule
from hocket.core.simulate import simulate
from hocket.core.timelines.timeline import Timeline
from hocket.errors import FitError, PlanError
from hocket.passes.gaps import fill_gaps
from hocket.passes.split_backward import split_backward

_MOST_TRIES: Final = 16  # to come down to the memory; each brings it nearer


def delay_weight_gradients(
    schedule: Schedule, costs: Costs, *, memory_bytes: float | None = None
) -> Schedule:
    r"""Split the backwards of an order, and move each W into a gap.

    Forwards, input gradients and updates keep their order, and so do each stage's
    weight gradients. The pass simulates several orders and returns the fastest, or the
    order given if none is faster.

    Args:
        schedule: a schedule without messages. Its body becomes a plain list of ops, so
            choose the number of steps first.
        costs: the costs of its program, `weight_grad_held_bytes` among them.
        memory_bytes: the most that each device may hold; unlimited when not given.

    Raises:
        PlanError: the schedule holds messages.
        DeadlockError: the schedule has a deadlock.
        FitError: the order needs more memory even if no W ever waits; names the least
            memory that suffices.

    >>> schedule = Schedule.parse("d0  0F0 0F1 0B0 0B1 0U\nd1  1F0 1B0 1F1 1B1 1U")
    >>> print(delay_weight_gradients(schedule, Costs.uniform()))
    d0  0F0 0F1 0I0 0W0 0I1 0W1 0U
    d1  1F0 1I0 1F1 1I1 1W0 1W1 1U

    Source: Oh et al., "Out-of-Order BackProp", EuroSys 2022 (gradient
    fast-forwarding); Qi et al., arXiv:2401.10241.
    """
    if any(op.kind in MESSAGES for lane in schedule.lanes for op in lane.ops):
        raise PlanError("the schedule holds messages already: use drop_messages first")
    prompt = _prompt(split_backward(schedule))
    tried = [simulate(order, costs) for order in dict.fromkeys((schedule, prompt))]
    limit = inf if memory_bytes is None else memory_bytes
    tried += _filled(prompt, costs, limit)
    fitting = [timeline for timeline in tried if timeline.most_bytes <= limit]
    if not fitting:
        raise too_little_memory(
            tried,
            limit,
            "for this order even if no weight gradient waits",
            "an order that holds fewer microbatches needs less",
        )
    return min(fitting, key=lambda timeline: timeline.makespan_s).schedule


def _prompt(schedule: Schedule) -> Schedule:
    """Return the order in which no W waits, if it is on the lane of its I."""
    lanes = tuple(map(_prompt_lane, schedule.lanes))
    return Schedule(schedule.program, lanes)


def _prompt_lane(lane: Lane) -> Lane:
    own = frozenset(lane.ops)

    def ops() -> Iterator[Op]:
        for op in lane.ops:
            follower = op.as_kind(Kind.BACKWARD_WEIGHT)
            leader = op.as_kind(Kind.BACKWARD_INPUT)
            if op.kind is not Kind.BACKWARD_WEIGHT or leader not in own:
                yield op
            if op.kind is Kind.BACKWARD_INPUT and follower in own:
                yield follower

    return replace(lane, ops=tuple(ops()))


def _filled(prompt: Schedule, costs: Costs, limit: float) -> Iterator[Timeline]:
    """Yield simulated orders whose filled gaps keep to the limit."""
    for overfill in (False, True):
        budgets = [inf] * prompt.program.num_devices
        for _ in range(_MOST_TRIES):
            filled = fill_gaps(prompt, costs, budgets=budgets, overfill=overfill)
            timeline = simulate(filled.schedule, costs)
            missing = [
                timeline.peak_bytes(device) - limit for device in range(len(budgets))
            ]
            if max(missing) <= 0:
                yield timeline
                break
            budgets = _lowered(budgets, filled.peak_bytes, missing)


def _lowered(
    budgets: Sequence[float], peaks: Sequence[float], missing: Sequence[float]
) -> list[float]:
    """Lower the budgets of the devices that hold too much."""
    return [
        min(budget, peak - more) if more > 0 else budget
        for budget, peak, more in zip(budgets, peaks, missing, strict=True)
    ]


def too_little_memory(
    tried: Iterable[Timeline],
    limit: float,
    where: str,
    way_out: str,
    *,
    prefix: str = "",
) -> FitError:
    """Return an error that names the least memory that an order needs."""
    least = min(tried, key=lambda timeline: timeline.most_bytes)
    needed_bytes = round(least.most_bytes)
    device = max(range(least.schedule.program.num_devices), key=least.peak_bytes)
    return FitError(
        f"{prefix}device {device} needs {needed_bytes} bytes {where}, and memory_bytes "
        f"is {limit:.0f}. The smallest that works is {needed_bytes}; {way_out}",
        device=device,
        needed_bytes=needed_bytes,
        memory_bytes=round(limit),
    )
