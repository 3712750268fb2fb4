"""Chooses the stages that recompute, so that every device fits its memory.

Recomputing costs a forward per microbatch, and saves what forwards leave for their
backwards, but for the one microbatch whose B is at work:

    keeps         2 microbatches between F and B     2 x activation_bytes at the peak
    recomputes    2 microbatches between F and B     1 x, while B runs

So a stage whose B follows each F at once (the last one of 1F1B) gains nothing by it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import Literal, TypeAlias, assert_never

from hocket.core.costs import Costs, with_recompute
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.core.simulator.memory import peak_parts
from hocket.draw.quantity import byte_size
from hocket.errors import FitError, PlanError

RecomputeName: TypeAlias = Literal["none", "all", "auto"]


def recomputing(
    recompute: RecomputeName,
    schedule: Schedule,
    costs: Costs,
    memory_bytes: int | None = None,
) -> Costs:
    """Return the costs with the stages that recompute.

    Args:
        recompute: "none", "all" that are trained, or "auto": as few as possible.
        schedule: the order of work.
        costs: the program's costs.
        memory_bytes: the memory of each device; for "auto".

    Raises:
        FitError: a device needs more even where all its stages recompute.
        PlanError: the name is unknown, or "auto" has no memory to fit.
    """
    program = schedule.program
    match recompute:
        case "none":
            return with_recompute(costs, program, ())
        case "all":
            return with_recompute(costs, program, program.trained_stages)
        case "auto":
            if memory_bytes is None or memory_bytes <= 0:
                raise PlanError(
                    f'recompute="auto" fits a device\'s memory; memory_bytes is '
                    f"{memory_bytes}: give the bytes that tensors may take on each"
                )
            chosen = stages_to_recompute(schedule, costs, memory_bytes)
            return with_recompute(costs, program, chosen)
        case _:
            assert_never(recompute)


def stages_to_recompute(
    schedule: Schedule, costs: Costs, memory_bytes: int
) -> frozenset[int]:
    """Return the fewest stages to recompute such that every device fits.

    On each device that needs it, the stage that saves the most bytes per second spent
    is added until it fits; then unneeded ones are removed again, the most expensive
    first, until none can be removed alone.

    Raises:
        FitError: a device needs more even where all its stages recompute.
    """
    trained = schedule.program.trained_stages
    peaks = _peaks(schedule, costs, ())
    if max(peaks) <= memory_bytes:
        return frozenset()
    _check_fits(schedule, costs, memory_bytes)
    on_device = [
        [stage for stage in stages if stage in trained]
        for stages in schedule.program.stages_on
    ]
    chosen: set[int] = set()
    while any(peak > memory_bytes for peak in peaks):
        left = [
            [s for s in stages if s not in chosen] if peak > memory_bytes else []
            for stages, peak in zip(on_device, peaks, strict=True)
        ]
        best = _best(schedule, costs, chosen, left, memory_bytes)
        if not best:  # this device's peak sinks only together with other devices'
            chosen = set(trained)
            break
        chosen |= best
        peaks = _peaks(schedule, costs, chosen)
    return _one_by_one(schedule, costs, chosen, memory_bytes)


def _best(
    schedule: Schedule,
    costs: Costs,
    chosen: Collection[int],
    left: Sequence[Sequence[int]],
    memory_bytes: int,
) -> set[int]:
    """Return, of each device's remaining stages, the one to add."""
    stage_costs = costs.of(schedule.program)
    rated: list[dict[int, tuple[bool, float]]] = [{} for _ in left]
    before = _peaks(schedule, costs, chosen)
    for together in zip_longest(*left):
        added = {stage for stage in together if stage is not None}
        after = _peaks(schedule, costs, {*chosen, *added})
        for stage in added:
            device = schedule.program.stages[stage].device
            spent_s = stage_costs[stage].forward_s or 1e-12
            fits = after[device] <= memory_bytes
            saved = before[device] - after[device]
            # What fits is rated by its seconds; what does not, by its bytes for them.
            rating = -spent_s if fits else saved / spent_s
            rated[device][stage] = (fits, rating)
    return {max(stages, key=stages.__getitem__) for stages in rated if stages}


def _one_by_one(
    schedule: Schedule, costs: Costs, chosen: Collection[int], memory_bytes: int
) -> frozenset[int]:
    """Remove the most expensive stages without which all devices still fit.

    A stage that recomputes is slower, so others may hold less meanwhile, or more: what
    one stage saves depends on which others recompute. So needed stages are tried again
    when others were removed.
    """
    stage_costs = costs.of(schedule.program)
    kept = frozenset(chosen)
    before: frozenset[int] | None = None
    while kept != before:
        before = kept
        for stage in sorted(kept, key=lambda s: -stage_costs[s].forward_s):
            if max(_peaks(schedule, costs, kept - {stage})) <= memory_bytes:
                kept -= {stage}
    return kept


def _check_fits(schedule: Schedule, costs: Costs, memory_bytes: int) -> None:
    """Raise FitError if a device needs more where all stages recompute."""
    least = with_recompute(costs, schedule.program, schedule.program.trained_stages)
    refuse_misfit(
        schedule,
        least,
        memory_bytes,
        "all its stages recompute",
        "more devices, more microbatches, a smaller batch or an optimizer with less "
        "state need less",
    )


def refuse_misfit(
    schedule: Schedule, costs: Costs, memory_bytes: int, where: str, advice: str
) -> None:
    """Refuse an order of which a device needs more memory than it has.

    Args:
        schedule: the order that needs the least.
        costs: its costs.
        memory_bytes: the memory of each device.
        where: what makes it need so little: follows "even where".
        advice: what to do; ends the error.

    Raises:
        FitError: names the device that needs most, and what for.
    """
    parts = peak_parts(simulate(schedule, costs), costs)
    sizes = [part.total_bytes for part in parts]
    device = sizes.index(max(sizes))
    if sizes[device] <= memory_bytes:
        return
    part = parts[device]
    raise FitError(
        f"device {device} needs {byte_size(sizes[device])} even where {where}, and "
        f"memory_bytes is {memory_bytes} ({byte_size(memory_bytes)}): "
        f"weights {byte_size(part.weight_bytes)}, gradients "
        f"{byte_size(part.gradient_bytes)}, optimizer {byte_size(part.optimizer_bytes)}"
        f", activations {byte_size(part.activation_bytes)}, messages "
        f"{byte_size(part.message_bytes)}. The smallest that works is "
        f"{sizes[device]}; {advice}",
        device=device,
        needed_bytes=sizes[device],
        memory_bytes=memory_bytes,
    )


def _peaks(schedule: Schedule, costs: Costs, stages: Collection[int]) -> list[float]:
    """Return each device's peak, in bytes."""
    timeline = simulate(schedule, with_recompute(costs, schedule.program, stages))
    return [curve.peak for curve in timeline.memory]
