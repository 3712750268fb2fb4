"""Delay weight gradients until a lane has no other work: out-of-order backprop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf
from typing import Final

from hocket.core.costs import Costs
from hocket.core.dataflow import Value, makes
from hocket.core.op import STEP_ENDS, Kind, Op
from hocket.core.schedule import Lane, Schedule
from hocket.core.simulate import simulate
from hocket.core.timelines.timeline import Timeline
from hocket.errors import FitError
from hocket.passes.segments import refuse_messages
from hocket.passes.split_backward import split_backward
from hocket.passes.value_times import ValueTimes

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
    refuse_messages(schedule)
    # The order in which no W waits, if it is on the lane of its I.
    lanes = map(_prompt_lane, split_backward(schedule).lanes)
    prompt = Schedule(schedule.program, tuple(lanes))
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
            budgets = [  # lower ones for devices that hold too much
                min(budget, peak - more) if more > 0 else budget
                for budget, peak, more in zip(
                    budgets, filled.peak_bytes, missing, strict=True
                )
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


# Put weight gradients into an order's gaps, as each device could while it works.
#
# All other ops keep their order. A lane decides with what it can know at that moment:
#
#     d1  1F0 1F1  .  .  .  1I0       when the gap begins, stage 2 still has its F1 and
#                  └ 1W? ┘            I0 to do, so 1I0 cannot begin before these have
#     d2  . 2F0 2F1 2I0               ended: a W that ends sooner delays nothing
#
# Where memory is short, the oldest weight gradients go before the op that needs room.

_TINY: Final = 1e-9  # of a gap: sums of the same seconds differ in their last digits


@dataclass(frozen=True, slots=True)
class Filled:
    """An order with its gaps filled.

    Args:
        schedule: the order.
        peak_bytes: the most bytes on each device that forwards left and that delayed
            weight gradients need, without all else that it holds.
    """

    schedule: Schedule
    peak_bytes: tuple[float, ...]


def fill_gaps(
    schedule: Schedule, costs: Costs, *, budgets: Sequence[float], overfill: bool
) -> Filled:
    """Put each W where, as far as can be known, it delays nothing.

    Args:
        schedule: a schedule with split backwards, without messages and deadlocks. The
            places of its W do not matter.
        costs: the costs of its program.
        budgets: the limit of each device's bytes, counted as in `Filled`; kept as far
            as weight gradients can free memory.
        overfill: whether a W may also begin in a gap that is shorter.
    """
    filler = _Filler(schedule, costs, budgets, overfill)
    filler.run()
    lanes = tuple(
        replace(lane, ops=tuple(filled.done))
        for lane, filled in zip(schedule.lanes, filler.lanes, strict=True)
    )
    return Filled(Schedule(schedule.program, lanes), tuple(filler.peak_bytes))


@dataclass(slots=True)
class _Lane:
    """A lane, partly filled.

    Args:
        device: the lane's device.
        fixed: its ops that keep their order.
        until_s: how long the fixed ops before each one take together.
        reductions: the R that go right behind the last W of their stage and step.
        num_left: how many W of each stage and step are still to come.
        position: the place of the next fixed op.
        free_s: when that op can begin.
        waiting: W that can be done, the oldest first.
        done: the ops of the filled lane.
    """

    device: int
    fixed: tuple[Op, ...]
    until_s: tuple[float, ...]
    reductions: dict[tuple[int, int], Op]
    num_left: dict[tuple[int, int], int]
    position: int = 0
    free_s: float = 0.0
    waiting: list[Op] = field(default_factory=list)
    done: list[Op] = field(default_factory=list)

    @classmethod
    def of(cls, lane: Lane, costs: Costs, schedule: Schedule) -> _Lane:
        """Return a lane at its begin."""
        stage_costs = costs.of(schedule.program)
        weights = [_stage_step(op) for op in lane.ops if op.kind is _WEIGHT]
        num_left = {key: weights.count(key) for key in dict.fromkeys(weights)}
        reductions = {
            _stage_step(op): op
            for op in lane.ops
            if op.kind is Kind.REDUCE and _is_whole(op, num_left, schedule)
        }
        fixed = tuple(
            op
            for op in lane.ops
            if op.kind is not _WEIGHT and op not in reductions.values()
        )
        spent_s = (stage_costs[op.stage].seconds(op.kind) for op in fixed)
        until_s = tuple(accumulate(spent_s, initial=0.0))
        return cls(lane.device, fixed, until_s, reductions, num_left)


_WEIGHT: Final = Kind.BACKWARD_WEIGHT


def _stage_step(op: Op) -> tuple[int, int]:
    return op.stage, op.step


def _is_whole(
    op: Op, num_weights: dict[tuple[int, int], int], schedule: Schedule
) -> bool:
    """Return whether all weight gradients of a stage and step are on one lane."""
    wanted = schedule.program.num_microbatches_of(op.stage)
    return num_weights.get(_stage_step(op), 0) == wanted


class _Filler:
    """Lanes that go on as far as they can decide, the one that is free first."""

    def __init__(
        self, schedule: Schedule, costs: Costs, budgets: Sequence[float], overfill: bool
    ) -> None:
        """Begin with nothing done."""
        self.program = schedule.program
        self.times = ValueTimes(schedule.program, costs)
        self.stage_costs = self.times.stage_costs
        self.budgets = budgets
        self.overfill = overfill
        self.lanes = [_Lane.of(lane, costs, schedule) for lane in schedule.lanes]
        self.home = {
            op: lane
            for lane, given in zip(self.lanes, schedule.lanes, strict=True)
            for op in given.ops
            if op.kind is _WEIGHT
        }
        self.maker = {
            value: (lane, position)
            for lane in self.lanes
            for position, op in enumerate(lane.fixed)
            for value in makes(op, self.program)
        }
        self.held_bytes: dict[int, float] = defaultdict(float)
        self.peak_bytes = [0.0] * self.program.num_devices

    def run(self) -> None:
        """Fill all lanes."""
        while lanes := [
            x for x in self.lanes if x.waiting or x.position < len(x.fixed)
        ]:
            lanes.sort(key=lambda lane: lane.free_s)
            if not any(self._advance(lane) for lane in lanes):
                # Each waits for another: then one of them waits for a W.
                self._do_weight(next(lane for lane in lanes if lane.waiting))

    def _advance(self, lane: _Lane) -> bool:
        """Do a lane's next op, if its start is known."""
        if lane.position == len(lane.fixed):
            self._do_weight(lane)
            return True
        op = lane.fixed[lane.position]
        ready_s, is_known = self._ready(op, lane)
        if lane.waiting and self._is_time_for_weight(lane, op, ready_s, is_known):
            self._do_weight(lane)
            return True
        if is_known:
            lane.position += 1
            self._do(lane, op, ready_s)
        return is_known

    def _is_time_for_weight(
        self, lane: _Lane, op: Op, ready_s: float, is_known: bool
    ) -> bool:
        """Return whether a W goes before an op that can begin then, or later."""
        gap_s = ready_s - lane.free_s
        wanted_s = self.times.seconds(lane.waiting[0]) * (1 - _TINY)
        if gap_s > _TINY * ready_s and (self.overfill or gap_s >= wanted_s):
            return True
        if op.kind in STEP_ENDS:
            return any(
                _stage_step(weight) == _stage_step(op) for weight in lane.waiting
            )
        more = self._added_bytes(op)
        held = self.held_bytes[lane.device]
        return is_known and more > 0 and held + more > self.budgets[lane.device]

    def _ready(self, op: Op, lane: _Lane) -> tuple[float, bool]:
        """Return when an op has all that it needs, or else a lower bound of that."""
        ready_s, is_known = 0.0, True
        for value, made_s, transfer_s in self.times.arrivals(op, lane.device):
            if made_s is None:
                made_s, is_known = self._earliest_s(value), False
            ready_s = max(ready_s, made_s + transfer_s)
        return ready_s, is_known

    def _earliest_s(self, value: Value) -> float:
        """Return a lower bound of when a value is made: when its lane could make it."""
        if value not in self.maker:
            return 0.0
        lane, position = self.maker[value]
        left_s = lane.until_s[position + 1] - lane.until_s[lane.position]
        return lane.free_s + left_s

    def _do_weight(self, lane: _Lane) -> None:
        """Do the oldest W, and the reduction that waited for the last one."""
        op = lane.waiting.pop(0)
        key = _stage_step(op)
        self._do(lane, op, self._ready(op, lane)[0])
        lane.num_left[key] -= 1
        if not lane.num_left[key] and key in lane.reductions:
            self._do(lane, lane.reductions[key], lane.free_s)

    def _do(self, lane: _Lane, op: Op, ready_s: float) -> None:
        lane.free_s = self.times.do(op, max(lane.free_s, ready_s))
        lane.done.append(op)
        if op.kind is Kind.BACKWARD_INPUT:
            weight = op.as_kind(_WEIGHT)
            self.home[weight].waiting.append(weight)
        held = self.held_bytes[lane.device] + self._added_bytes(op)
        self.held_bytes[lane.device] = held
        self.peak_bytes[lane.device] = max(self.peak_bytes[lane.device], held)

    def _added_bytes(self, op: Op) -> float:
        """Return the bytes that an op adds once it is done; below 0 where it frees."""
        if not self.program.stages[op.stage].trainable:
            return 0.0
        cost = self.stage_costs[op.stage]
        match op.kind:
            case Kind.FORWARD:
                return cost.kept_bytes + self._input_bytes(op.stage)
            case Kind.BACKWARD_INPUT:
                added = cost.weight_grad_held_bytes - cost.kept_bytes
                return added - self._input_bytes(op.stage) * (not cost.holds_input)
            case Kind.BACKWARD_WEIGHT:
                freed = self._input_bytes(op.stage) * cost.holds_input
                return -cost.weight_grad_held_bytes - freed
            case _:
                return 0.0

    def _input_bytes(self, stage: int) -> int:
        return sum(
            self.stage_costs[source].output_bytes
            for source in self.program.sources[stage]
        )
