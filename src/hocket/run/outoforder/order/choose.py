"""Tries orders of a captured step, and keeps the fastest one that was measured.

    serial order ──▶ seconds of each region ──▶ orders in two lanes ──▶ all in turn
                                                          ▲                 │
                         a few W moved to the other lane  └── the fastest ◀─┘

The serial order is always among them: another one must be faster by more than noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random
from statistics import median
from time import perf_counter
from typing import Final

from hocket.core.costs import Costs, StageCost
from hocket.core.footprint import Footprint, MemoryPlan, plan_memory
from hocket.core.op import WHOLE_OR_SPLIT_BACKWARD, Kind, Op
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.core.timelines.timeline import Timeline
from hocket.errors import FitError
from hocket.model.profile.allocations import allocations
from hocket.model.profile.precision import rounds
from hocket.passes.across_steps import carry_weight_gradients, several_steps
from hocket.passes.beside_critical_path import (
    MeasuredProgram,
    beside_critical_path,
    longest_path,
    stages_beside,
    with_early_release,
    with_inline,
)
from hocket.passes.serial import serial
from hocket.planner.stages import StageSlowdown
from hocket.run.device.device import Device
from hocket.run.device.stopwatch import make_stopwatch
from hocket.run.outoforder.capture.captured_step import CapturedStep
from hocket.run.outoforder.capture.code import rate_name
from hocket.run.outoforder.play.step_replay import StepPlayer, StepReplay, Tensors

# Measures a step's regions one by one, and whole steps of several orders in turn.


_NUM_STEPS: Final = 5  # the spread of a median is then some percent
_MOST_S: Final = 2.0  # for all steps of one order, if a step is long
_NUM_HALVINGS: Final = 12  # a capacity from 1 to 2, to 1 / 4096
_TIMEOUT_S: Final = 600.0


def measured_costs(
    player: StepPlayer,
    ops: Sequence[Op],
    given: Tensors,
    footprint: Footprint,
    device: Device,
) -> Costs:
    """Play the serial order some times, and return the median seconds of each op.

    Args:
        player: plays the serial order.
        ops: its ops.
        given: the tensors of a step; weights and states change.
        footprint: the memory of its ops.
        device: the device.
    """
    place = {op: i for i, op in enumerate(ops)}
    columns: list[list[float]] = [[] for _ in ops]
    watch = make_stopwatch(len(ops), device.torch_device)

    def timed(lane: int, op: Op, run: Callable[[], None]) -> None:
        watch.start(place[op])
        run()
        watch.end(place[op])

    for counts in _rounds():
        player.play(given, timed)
        device.synchronize(_TIMEOUT_S)
        start_s, end_s = watch.read().value
        for column, seconds in zip(columns, (end_s - start_s).tolist(), strict=True):
            if counts:
                column.append(seconds)
    medians = map(median, columns)
    seconds = dict(zip(ops, medians, strict=True))
    return Costs(tuple(_stage_costs(seconds, footprint)))


def with_work_bytes(
    player: StepPlayer,
    plan: MemoryPlan,
    footprint: Footprint,
    given: Tensors,
    device: Device,
) -> Footprint:
    """Measure what the kernels of each op take, beside the tensors that it makes.

    Args:
        player: plays the serial order.
        plan: the order's plan.
        footprint: the memory of its ops, without that.
        given: the tensors of a step; weights and states change.
        device: the device.
    """
    (lane,) = plan.schedule.lanes
    levels, most = plan.level_bytes[0], plan.op_bytes[0]
    with allocations(device.torch_device) as log:
        # What the first step allocates, the second frees: in the log, both count.
        player.play(given)

        def counted(lane: int, op: Op, run: Callable[[], None]) -> None:
            with log.span():
                run()

        player.play(given, counted)
    more = {
        (op.kind, op.stage): max(0, peak - (most[i] - levels[i]))
        for i, (op, peak) in enumerate(zip(lane.ops, log.peaks, strict=True))
    }
    return replace(footprint, work_bytes=more)


def measured_in_turn(replays: Sequence[StepReplay], device: Device) -> list[float]:
    """Return the median seconds of a step of each order, played in turn."""
    columns: list[list[float]] = [[] for _ in replays]

    for counts in _rounds(most_s=_MOST_S * len(replays)):
        for column, one in zip(columns, replays, strict=True):
            begin_s = perf_counter()
            one.run()
            device.synchronize(_TIMEOUT_S)
            if counts:
                column.append(perf_counter() - begin_s)
    return [*map(median, columns)]


def with_capacity(costs: Costs, schedule: Schedule, measured_s: float) -> Costs:
    """Fit how much two lanes disturb each other to a measured step in both.

    Args:
        costs: the seconds of ops that run alone.
        schedule: the order in two lanes.
        measured_s: how long its step takes.
    """
    low, high = 1.0, 2.0
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        fitted = replace(costs, lane_capacity=middle)
        if simulate(schedule, fitted).makespan_s > measured_s:
            low = middle
        else:
            high = middle
    return replace(costs, lane_capacity=high)


def scaled_to(costs: Costs, schedule: Schedule, measured_s: float) -> Costs:
    """Scale all ops alike, so that an order is predicted to take what was measured.

    Ops that are timed one by one take longer than in a step, or a machine that others
    use was slower or faster then.
    """
    factor = measured_s / simulate(schedule, costs).makespan_s
    slowdown = StageSlowdown(factor, factor, factor)
    return replace(costs, stages=tuple(map(slowdown.slowed, costs.stages)))


def _rounds(most_s: float = _MOST_S) -> Iterator[bool]:
    """Yield for each round whether it counts; the first replay loads kernels."""
    return rounds(1, _NUM_STEPS, most_s=most_s)


def _stage_costs(
    seconds: Mapping[Op, float], footprint: Footprint
) -> Iterator[StageCost]:
    read = {
        -event
        for (kind, _), events in footprint.events.items()
        if kind in WHOLE_OR_SPLIT_BACKWARD
        for event in events
    }
    for stage in range(1 + max(op.stage for op in seconds)):
        forward = Op(Kind.FORWARD, stage, 0)
        events = footprint.of(forward)
        kept = [footprint.sizes[x - 1] for x in events if x > 0 and x in read]
        yield StageCost(
            forward_s=seconds[forward],
            input_grad_s=seconds[Op(Kind.BACKWARD_INPUT, stage, 0)],
            weight_grad_s=seconds[Op(Kind.BACKWARD_WEIGHT, stage, 0)],
            update_s=seconds[Op(Kind.UPDATE, stage)],
            activation_bytes=sum(kept),
        )


# The median of a few steps spreads by some percent: a smaller gain may be none.
_LEAST_GAIN: Final = 0.02  # of a step's seconds
# Each try of local search plans, captures and replays an order about a dozen times.
# Together they stay below what the capture takes, a few seconds for small nets.
_NUM_TRIES: Final = 6
_SEARCH_S: Final = 10.0  # after so long, no other try begins: steps may be long
_SEED: Final = 0


@dataclass(frozen=True, slots=True)
class OrderCandidate:
    """One order that was tried.

    Args:
        name: how it was made: "serial", "beside critical path", "longest path", "local
            search", or "across steps".
        schedule: the order: one step, or some where they overlap.
        predicted: its timeline in the simulator, with the bytes over time; where steps
            overlap, with the bound of them.
        measured_s: the median seconds of a step.
        peak_bytes: the most memory that it takes, whatever each op takes.
        kernels: which kernels its regions call: "plain"; or "fused LSTM", where LSTMs
            are the device's own kernels and not their steps in time.
    """

    name: str
    schedule: Schedule
    predicted: Timeline
    measured_s: float
    peak_bytes: int
    kernels: str


class _Trial:
    """Measures orders of one step."""

    def __init__(
        self, step: CapturedStep, given: Tensors, device: Device, always_bytes: int
    ) -> None:
        self.step, self.given, self.device = step, given, device
        footprint = replace(step.code.footprint, always_bytes=always_bytes)
        self.footprint = footprint
        self.program = step.regions.program
        changing = {rate_name(i) for x in step.updates.values() for i in x.groups}
        if device.has_graphs:
            changing.update(node.name for node in step.regions.step.batch)
        self._changing = frozenset(changing)

    def player(self, plan: MemoryPlan) -> StepPlayer:
        losses = frozenset(self.step.losses.values())
        return StepPlayer(self.step.code, losses, self.step.written, plan, self.device)

    def replay(self, plan: MemoryPlan) -> StepReplay:
        made = StepReplay(self.player(plan), self.given, self.device, self._changing)
        if self.device.has_graphs:
            made.capture()
        return made


def choose_order(
    step: CapturedStep,
    given: Tensors,
    device: Device,
    always_bytes: int,
    memory_bytes: int | None,
    *,
    across_steps: bool = False,
) -> tuple[StepReplay, tuple[OrderCandidate, ...]]:
    """Measure some orders of a step, and choose the fastest that fits.

    Args:
        step: the step.
        given: its tensors; weights, buffers and states change.
        device: with two lanes.
        always_bytes: what is in memory all the time.
        memory_bytes: the most memory that an order may take.
        across_steps: whether to try W and U in the next step.

    Returns:
        What runs its steps; and all orders that were tried, the fastest first.

    Raises:
        FitError: the serial order needs more.
    """
    trial = _Trial(step, given, device, always_bytes)
    program = trial.program
    first = plan_memory(serial(program), trial.footprint)
    player = trial.player(first)
    footprint = with_work_bytes(player, first, trial.footprint, given, device)
    first = plan_memory(first.schedule, footprint)
    if memory_bytes is not None and first.peak_bytes > memory_bytes:
        raise FitError(
            f"memory_bytes={memory_bytes:,} is less than the {first.peak_bytes:,} that "
            "the step needs in its serial order: allow that, or use a smaller batch",
            device=0,
            needed_bytes=first.peak_bytes,
            memory_bytes=memory_bytes,
        )
    ops = first.schedule.lanes[0].ops
    costs = measured_costs(player, ops, given, footprint, device)
    measured = MeasuredProgram(program, costs, footprint)
    plans = {"serial": first}
    if len(device.lanes) > 1:
        plans["beside critical path"] = beside_critical_path(measured, memory_bytes)
        order = longest_path(program, costs)
        plans["longest path"] = with_early_release(order, measured)
        if across_steps:
            plans["across steps"] = _across_steps(measured, device)
    most = inf if memory_bytes is None else memory_bytes
    tried = [
        _Tried(name, plan, trial.replay(plan))
        for name, plan in plans.items()
        if plan.peak_bytes <= most
    ]
    tried = _in_turn(tried, device)
    one_step = [x for x in tried if not x.plan.carried]
    two_lanes = [x for x in one_step if len(x.plan.schedule.lanes) > 1]
    if two_lanes:
        one = two_lanes[0]
        costs = with_capacity(costs, one.plan.schedule, one.measured_s)
        measured = replace(measured, costs=costs)
        tried += _searched(trial, measured, one_step, most)
        # The fastest of several has been lucky: its first number is too small.
        tried = _in_turn(tried, device)
    costs = scaled_to(costs, first.schedule, tried[0].measured_s)
    measured = replace(measured, costs=costs)
    tried.sort(key=_rank)
    for each in tried:
        each.replay.forget()
    candidates = tuple(_candidate(x, measured, step.kernels) for x in tried)
    return tried[0].replay, candidates


def faster_kernels(replays: Sequence[StepReplay], device: Device) -> int:
    """Return which of the orders with several kernels is the fastest.

    Args:
        replays: run the fastest order with each choice of kernels. The first one is
            kept unless another one is faster by more than noise.
        device: the device.
    """
    seconds = measured_in_turn(replays, device)
    for replay in replays:
        replay.forget()
    seconds[0] *= 1.0 - _LEAST_GAIN
    return seconds.index(min(seconds))


def _across_steps(measured: MeasuredProgram, device: Device) -> MemoryPlan:
    plan = plan_memory(carry_weight_gradients(measured), measured.footprint)
    if not device.has_graphs:
        return plan
    # A graph copies what is kept to tensors that are there all the time.
    return replace(plan, always_bytes=plan.always_bytes + plan.kept_bytes)


@dataclass(frozen=True, slots=True)
class _Tried:
    name: str
    plan: MemoryPlan
    replay: StepReplay
    measured_s: float = 0.0


def _in_turn(tried: Sequence[_Tried], device: Device) -> list[_Tried]:
    """Measure orders, all in the same rounds: the machine is slower at times."""
    seconds = measured_in_turn([one.replay for one in tried], device)
    return [replace(one, measured_s=s) for one, s in zip(tried, seconds, strict=True)]


def _rank(tried: _Tried) -> float:
    """Order by seconds; the serial order may be a little slower."""
    return tried.measured_s * (1.0 - _LEAST_GAIN * (tried.name == "serial"))


def _candidate(
    tried: _Tried, measured: MeasuredProgram, kernels: str
) -> OrderCandidate:
    schedule, plan = tried.plan.schedule, tried.plan
    if plan.carried:
        schedule = several_steps(schedule)
    timeline = simulate(schedule, measured.costs)
    curve = plan.bound_curve() if plan.carried else plan.curve(timeline)
    timeline = replace(timeline, memory=(curve,))
    return OrderCandidate(
        tried.name, schedule, timeline, tried.measured_s, tried.plan.peak_bytes, kernels
    )


def _searched(
    trial: _Trial, measured: MeasuredProgram, tried: Sequence[_Tried], most_bytes: float
) -> list[_Tried]:
    """Move blocks of W between the lanes, as long as the step becomes faster."""
    best, random = min(tried, key=_rank), Random(_SEED)
    seen = {one.plan.schedule.lanes for one in tried}
    found: list[_Tried] = []
    begin_s = perf_counter()
    for _ in range(_NUM_TRIES):
        if perf_counter() - begin_s > _SEARCH_S:
            break
        plan = with_inline(measured, _neighbour(best.plan.schedule, random))
        if plan.peak_bytes > most_bytes or plan.schedule.lanes in seen:
            continue
        seen.add(plan.schedule.lanes)
        new = _Tried("local search", plan, trial.replay(plan))
        old, new = _in_turn([best, new], trial.device)
        if new.measured_s < old.measured_s * (1.0 - _LEAST_GAIN):
            best = new
            found.append(best)
    return found[-1:]


def _neighbour(schedule: Schedule, random: Random) -> list[int]:
    """Return the stages whose W is in lane 0, after a block of them has changed."""
    beside = dict(stages_beside(schedule))
    stages = sorted(beside)
    length = max(1, len(stages) // random.choice((2, 4, 8)))
    begin = random.randrange(len(stages) - length + 1)
    to_side = random.random() < 0.5
    beside.update(dict.fromkeys(stages[begin : begin + length], to_side))
    return [stage for stage in stages if not beside[stage]]
