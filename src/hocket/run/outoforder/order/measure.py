"""Measures a step's regions one by one, and whole steps of several orders in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Final

from hocket.core.costs import Costs, StageCost
from hocket.core.footprint import Footprint, MemoryPlan
from hocket.core.op import WHOLE_OR_SPLIT_BACKWARD, Kind, Op
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.model.profile.allocations import allocations
from hocket.model.profile.precision import rounds
from hocket.planner.stages import StageSlowdown
from hocket.run.device.device import Device
from hocket.run.device.stopwatch import make_stopwatch
from hocket.run.outoforder.play.step_player import StepPlayer, Tensors
from hocket.run.outoforder.play.step_replay import StepReplay

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
