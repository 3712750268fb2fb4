"""Chooses how long sharded stages stay whole, so that every device fits its memory.

Whole weights that stay need no second gather; those that are released need one for
each run of ops of their stage, or for each op (see `hocket.passes.add_gathers`):

    keeps        gathers of a step      holds whole weights
    "step"       one                    from the first to the last op that reads them
    "run"        one for each run       beside no op of another stage but the one before
    "op"         one for each op        the same, and not between two ops of the stage
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hocket.core.costs import Costs
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.passes.add_gathers import KEEPS, Keep, add_gathers
from hocket.planner.recompute import refuse_misfit


def with_copies(order: Schedule, num_replicas: int, num_shards: int) -> Schedule:
    """Return the same order for other numbers of replicas and shards."""
    program = replace(order.program, num_replicas=num_replicas, num_shards=num_shards)
    return replace(order, program=program)


def with_shards(costs: Costs, program: Program) -> Costs:
    """Return the costs of a program whose stages are sharded.

    A device keeps one shard of the weights and of the optimizer's state, and gathers
    the whole weights over the link of shards. Its gradients are whole until R.

    Args:
        costs: those of the same stages without shards.
        program: says how many shards there are.
    """
    num, link = program.num_shards, costs.shard_link or costs.reduce_link
    if num == 1:
        return costs
    wholes = [cost.whole_bytes or cost.weight_bytes for cost in costs.of(program)]
    stages = tuple(
        replace(
            cost,
            weight_bytes=-(-cost.weight_bytes // num),
            optimizer_bytes=-(-cost.optimizer_bytes // num),
            update_work_bytes=-(-cost.update_work_bytes // num),
            update_s=cost.update_s / num,
            whole_bytes=whole_bytes,
            unshard_s=link.all_gather_s(-(-whole_bytes // num), num),
        )
        for cost, whole_bytes in zip(costs.of(program), wholes, strict=True)
    )
    return replace(costs, stages=stages, is_device_share=False)


def choose_gathers(
    schedule: Schedule, costs: Costs, memory_bytes: int
) -> dict[int, Keep]:
    """Return for each stage the fastest of "step", "run" and "op" that memory allows.

    While a device needs more than it has, its stage of the most whole bytes is released
    after each run; and if all are, after each op. Then stages stay whole longer again
    where all devices fit without their release, those of the fewest bytes first.

    Args:
        schedule: an order that `add_gathers` takes. Without shards, all stay "step".
        costs: the costs of its program, with `unshard_s` and `whole_bytes`.
        memory_bytes: the memory of each device.

    Raises:
        PlanError: the order cannot be of sharded stages.
        FitError: a device needs more even where each op gathers for itself.
    """
    program = schedule.program
    keeps: dict[int, Keep] = dict.fromkeys(range(program.num_stages), "step")
    if program.num_shards == 1:
        return keeps
    least: dict[int, Keep] = dict.fromkeys(keeps, "op")
    peaks = _peaks(schedule, costs, keeps)
    if max(peaks) > memory_bytes:
        refuse_misfit(
            add_gathers(schedule, least),
            costs,
            memory_bytes,
            "each op gathers its stage's weights for itself",
            "more shards, more stages on each device, more microbatches or a smaller "
            "batch need less",
        )
    while max(peaks) > memory_bytes:
        full = (d for d, peak in enumerate(peaks) if peak > memory_bytes)
        released = [_released(schedule, costs, keeps, device) for device in full]
        shorter = {stage for stage in released if stage is not None}
        if not shorter:  # what others wait for makes its peak: all must be short
            keeps = least
            break
        for stage in shorter:
            keeps[stage] = KEEPS[KEEPS.index(keeps[stage]) + 1]
        peaks = _peaks(schedule, costs, keeps)
    return _kept_longer(schedule, costs, keeps, memory_bytes)


def _released(
    schedule: Schedule, costs: Costs, keeps: Mapping[int, Keep], device: int
) -> int | None:
    """Return the stage of a device to release sooner; None if each op gathers."""
    sizes = costs.of(schedule.program)
    own = schedule.program.stages_on[device]
    for keep in KEEPS[:-1]:
        kept = [stage for stage in own if keeps[stage] == keep]
        if kept:
            return max(kept, key=lambda stage: sizes[stage].whole_bytes)
    return None


def _kept_longer(
    schedule: Schedule, costs: Costs, keeps: Mapping[int, Keep], memory_bytes: int
) -> dict[int, Keep]:
    """Return the same, with each stage whole as long as all devices still fit."""
    sizes = costs.of(schedule.program)
    found = dict(keeps)
    for stage in sorted(found, key=lambda stage: sizes[stage].whole_bytes):
        for keep in KEEPS[: KEEPS.index(found[stage])]:
            longer = {**found, stage: keep}
            if max(_peaks(schedule, costs, longer)) <= memory_bytes:
                found = longer
                break
    return found


def _peaks(schedule: Schedule, costs: Costs, keeps: Mapping[int, Keep]) -> list[float]:
    """Return each device's peak, in bytes."""
    timeline = simulate(add_gathers(schedule, keeps), costs)
    return [curve.peak for curve in timeline.memory]
