"""Fill the bubbles of an order with the forwards of a net that has its own data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from hocket.core.costs import Costs, StageCost
from hocket.core.program import Net, Stage
from hocket.core.schedule import Schedule
from hocket.errors import PlanError
from hocket.passes.fill_with import fill_with, long_step_s

_NET: Final = "fill-"  # and the device that the net is on
_SHARES: Final = (1.0, 0.95, 0.85, 0.7, 0.5)  # of what fills all idle time
_MOST: Final = 32  # forwards of a device in a step: shorter ones are better batched
_ROUNDING: Final = 1e-9


def fill_bubbles(
    schedule: Schedule,
    costs: Costs,
    forwards: Sequence[StageCost],
    *,
    max_slowdown: float,
) -> tuple[Schedule, Costs]:
    r"""Put as many forwards of another net into each device's waits as fit.

    Each device has the whole net, and data of its own, so that nothing flows between
    the net and the trained one, or between devices: a forward goes wherever its device
    would wait at least as long, up to 32 in a step. The trained net's order does not
    change.

        d0  0F0 0F1 f   f   0B0 f   0B1 0U
        d1  f   1F0 1B0 1F1 1B1 f   f   1U

    Args:
        schedule: an order of one step, without messages.
        costs: the costs of its program, stage by stage.
        forwards: the cost of one forward of the net, for each device.
        max_slowdown: the share by which a step of a long run may become longer.

    Returns:
        The order with nets `fill-0`, `fill-1`, ... whose stages come behind the
        program's, and its costs; as given where no forward fits anywhere.

    Raises:
        PlanError: the schedule is of several steps, or `costs` are by device.

    Source: Arfeen et al., "PipeFill: Using GPUs During Bubbles in Pipeline-parallel LLM
    Training", arXiv:2410.07192 (MLSys'25): each GPU fills its own bubbles with a job
    of its own.

    >>> from hocket.schedules import make_schedule
    >>> order = make_schedule("1f1b", num_devices=2, num_microbatches=2)
    >>> each = StageCost(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0)
    >>> filled, _ = fill_bubbles(
    ...     order, Costs((each, each)), [StageCost(forward_s=1.0)] * 2, max_slowdown=0.0
    ... )
    >>> print("\n".join(str(filled).splitlines()[-2:]))
    d0  0F0 0F1 2F0 2F1 0B0 2F2 0B1 0U
    d1  3F0 1F0 1B0 1F1 1B1 3F1 3F2 1U
    """
    program = schedule.program
    if len(costs.stages) != program.num_stages:
        raise PlanError(
            f"there are costs of {len(costs.stages)} stages, and the order has "
            f"{program.num_stages}: give one for each stage"
        )
    alone_s = long_step_s(schedule, costs)
    longest_s = alone_s * (1.0 + max_slowdown + _ROUNDING)
    most = {
        device: min(_MOST, int(idle_s / forwards[device].forward_s + _ROUNDING))
        for device, idle_s in enumerate(_idle_s(schedule, costs, alone_s))
        if forwards[device].forward_s
    }

    def fits(counts: Mapping[int, int]) -> bool:
        filled = _filled(schedule, costs, forwards, counts)
        return long_step_s(*filled) <= longest_s

    for share in _SHARES:  # each trial simulates a step: few, where there are many ops
        counts = {device: int(share * num) for device, num in most.items()}
        if fits(counts):
            break
    else:
        counts = dict.fromkeys(most, 0)
    for device, num in most.items():  # some devices may have room for more
        while num > counts[device] and not fits(counts | {device: num}):
            num -= max(1, (num - counts[device]) // 3)
        counts[device] = num
    return _filled(schedule, costs, forwards, counts)


def _idle_s(schedule: Schedule, costs: Costs, step_s: float) -> list[float]:
    """Return how long each device has nothing to do in a step."""
    busy_s = [0.0] * schedule.program.num_devices
    for lane in schedule.lanes:
        for op in lane.ops:
            busy_s[lane.device] += costs.stages[op.stage].seconds(op.kind)
    return [step_s - seconds for seconds in busy_s]


def _filled(
    schedule: Schedule,
    costs: Costs,
    forwards: Sequence[StageCost],
    counts: Mapping[int, int],
) -> tuple[Schedule, Costs]:
    """Fill an order with so many forwards on each device."""
    if not counts or not any(counts.values()):
        return schedule, costs
    program = schedule.program
    used = {device: count for device, count in counts.items() if count}
    names = {device: f"{_NET}{device}" for device in used}
    joint = replace(
        program,
        nets=(*program.nets, *(Net(names[d], count) for d, count in used.items())),
        stages=(
            *program.stages,
            *(Stage(names[d], d, trainable=False) for d in used),
        ),
    )
    all_costs = replace(costs, stages=(*costs.stages, *(forwards[d] for d in used)))
    ahead = dict.fromkeys(names.values(), 0)
    order = fill_with(schedule, joint, [*ahead], costs=all_costs, look_ahead=ahead)
    return order, all_costs
