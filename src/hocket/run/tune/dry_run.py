"""Runs a few steps before the first one, to measure ops and messages in place.

Layers that are measured one at a time find their weights still in the caches. In a
lane, ops of several stages and microbatches follow each other, and messages pass
through the caches. So all workers run their lanes together, with real messages, up to
the point where gradients would be reduced:

    lane 0      0F0 0F1 0F2     0B0 0F3 0B1 ...  │ U
    lane 1          1F0 1B0 1F1 1B1 1F2 1B2 ...  │ U
                                                 └─ not this

Of a flush-free order they run as many steps as its body spans, all with the same
weights. Only ops in the body are measured: there the ops of two steps and of several
stages alternate, as they do in training. In prologue and epilogue, ops of one stage
follow each other, and are faster.

    0F0 0F1 0F2 0F3 │ 2F0 2B0 ... 0F0@1 0B0 ... │ 2F0@1 2B0@1 ... 0B0@1 0B1@1 ...
                    └ the body: counts         ─┘

Gradients, batch-norm statistics, random state and attributes of modules are restored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle, islice
from math import inf
from time import perf_counter
from typing import Final

import torch

from hocket.core.costs import Costs
from hocket.core.op import STEP_ENDS, Op
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.core.timelines.fit import fit
from hocket.core.timelines.timeline import Timeline
from hocket.model.capture.capture import Captured
from hocket.model.profile.measure import restored_model
from hocket.model.profile.precision import is_precise, rounds
from hocket.run.comm.step_header import StepHeader
from hocket.run.data.batch import Microbatch
from hocket.run.data.step_batch import NetBatches, StepBatch
from hocket.run.device.memory import MemoryWatch
from hocket.run.engine.lanes.play_plan import Portion, plan_to_play
from hocket.run.engine.lanes.player import Player
from hocket.run.engine.lanes.point_to_point import PointToPoint
from hocket.run.engine.lanes.stage_table import StageTable
from hocket.run.engine.lanes.wiring import wire
from hocket.run.engine.make_runners import make_runners
from hocket.run.engine.programs.net_setup import NetSetup, modules_of
from hocket.run.engine.timeline import gather_timeline
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.stage.runner import StageRunner

_STEP: Final = 0  # its number
_MIN_STEPS: Final = 3  # and one more, to warm up
_ENOUGH_S: Final = 0.6  # no further round once this has passed on rank 0
_LONG_S: Final = 4.0  # one round is enough once this has


def steps_as_one(schedule: Schedule) -> Schedule:
    r"""Return the same ops in the same order, as microbatches of one step.

    An order of one step stays as it is.

    >>> two = Schedule.parse("d0  0F0 0F1 0F0@1 0B0 0B1 0F1@1 0B0@1 0B1@1")
    >>> print(steps_as_one(two))
    d0  0F0 0F1 0F2 0B0 0B1 0F3 0B2 0B3

    Args:
        schedule: a schedule without R and U, which end a step.
    """
    program = schedule.program
    num_steps = program.num_steps
    if num_steps == 1:
        return schedule
    nets = tuple(
        replace(net, num_microbatches=net.num_microbatches * num_steps)
        for net in program.nets
    )
    stages = tuple(replace(stage, delay=0) for stage in program.stages)
    lanes = tuple(
        replace(lane, ops=tuple(_moved(op, program) for op in lane.ops))
        for lane in schedule.lanes
    )
    return Schedule(replace(program, nets=nets, stages=stages, num_steps=1), lanes)


def _moved(op: Op, program: Program) -> Op:
    assert op.microbatch is not None, f"{op} ends a step"
    before = op.step * program.num_microbatches_of(op.stage)
    return replace(op, microbatch=before + op.microbatch, step=0)


def dry_run(
    costs: Costs,
    captured: Sequence[Captured],
    schedule: Schedule,
    nets: Sequence[NetSetup],
    parts: Mapping[str, Sequence[Microbatch]],
    channels: PointToPoint,
) -> Costs:
    """Return the costs with the seconds measured in all lanes.

    Every worker must call this.

    Args:
        costs: sums of single layers' costs; the ratio of I to W is kept if the order
            has whole backwards.
        captured: the captured models of all nets.
        schedule: one step; or several that overlap, with a repeating body. No loss
            reads a whole batch.
        nets: all nets.
        parts: each net's microbatches of one step, in each step the same.
        channels: this worker's messages, as in training.
    """
    context, wiring = channels.context, wire(schedule.program, nets)
    world, device = context.world, context.layout.device
    if schedule.body:
        least = schedule.program.num_steps - schedule.num_repeats + 1
        schedule = schedule.with_num_steps(least)
    order = steps_as_one(_without_ends(schedule))
    modules = modules_of(schedule.program, nets)
    own = [modules[stage].to(world.device) for stage in order.program.stages_on[device]]
    with ExitStack() as stack:
        for model in captured:
            stack.enter_context(restored_model(model, world.device, own))
        runners = make_runners(
            order.program,
            nets,
            context,
            wiring,
            seed=0,
            recomputes=[i for i, x in enumerate(costs.stages) if x.recomputes],
            checks_loss=False,  # the first step does, and all workers hear of it
        )
        for runner in runners.values():
            runner.train(mode=runner.training)
        watch = MemoryWatch(schedule, costs, world, device)
        plan = plan_to_play(order)
        table = StageTable(plan, runners, {}, channels, wiring=wiring)
        player = table.player(watch.on_error, "dry run ")
        batch = _batch(parts, order.program, world.device)
        least = max(1, _MIN_STEPS // schedule.program.num_steps)
        found = _played(player, runners, batch, order, costs, context, least)
    return fit(costs, found, _in_body(schedule) if schedule.body else None)


def _played(
    player: Player,
    runners: Mapping[int, StageRunner],
    batch: NetBatches,
    order: Schedule,
    costs: Costs,
    context: WorkerContext,
    least: int,
) -> list[Timeline]:
    """Return the timelines of some rounds, behind one to warm up, on every worker.

    They end when they have taken long enough, or differ little.
    """
    batches = {_STEP: batch}
    found: list[Timeline] = []
    begin_s, spent_s = perf_counter(), 0.0

    def is_enough() -> bool:
        if len(found) < least:
            return spent_s >= _LONG_S
        is_late = spent_s >= _ENOUGH_S
        return is_late or is_precise([[x.makespan_s for x in found]])

    for counts in rounds(1, most_s=inf, is_enough=is_enough):
        context.world.barrier("dry run")
        player.begin(batch)
        record = player.play(Portion.STEP, _STEP, batches)
        for runner in runners.values():
            runner.loss.values.read()
            for parameter in runner.parameters.values():
                parameter.grad = None
        played = gather_timeline(order, costs, record, context)
        found += [played] * counts
        # On a GPU that others use, the host's waits around a step may take longer.
        spent_s = context.world.broadcast_json(perf_counter() - begin_s, name="spent")
    return found


def _batch(
    parts: Mapping[str, Sequence[Microbatch]], program: Program, device: torch.device
) -> NetBatches:
    """Return the same microbatches of each net for all steps."""
    found = {}
    for net in program.nets:
        of_step = [part.on(device) for part in parts[net.name]]
        whole = [*islice(cycle(of_step), net.num_microbatches)]
        sizes = tuple(part.num_samples for part in whole)
        step = StepHeader(_STEP, 0, sum(sizes), sizes)
        found[net.name] = StepBatch(step, tuple(whole))
    return found


def _without_ends(schedule: Schedule) -> Schedule:
    """Return the order without reductions and updates."""
    lanes = tuple(
        replace(lane, ops=tuple(op for op in lane.ops if op.kind not in STEP_ENDS))
        for lane in schedule.lanes
    )
    return replace(schedule, lanes=lanes, body=(), num_repeats=0)


def _in_body(schedule: Schedule) -> list[slice]:
    """Return, for each lane, which ops are in the body, without R and U."""
    return [
        slice(*(sum(op.kind not in STEP_ENDS for op in lane.ops[:end]) for end in ends))
        for lane, ends in zip(schedule.lanes, schedule.body, strict=True)
    ]
