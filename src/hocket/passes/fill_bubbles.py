"""Fill the bubbles of an order with the forwards of a net that has its own data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from hocket.core.costs import Costs, StageCost
from hocket.core.gates import gates_of
from hocket.core.op import Kind, Op
from hocket.core.program import Net, Stage
from hocket.core.schedule import Lane, Schedule
from hocket.core.simulate import long_step_s, simulate
from hocket.core.simulator.work import prepare
from hocket.core.timelines.arrays import Floats
from hocket.core.timelines.timeline import Timeline
from hocket.errors import PlanError

_NET: Final = "fill-"  # followed by the device's number
_SHARES: Final = (1.0, 0.95, 0.85, 0.7, 0.5)  # of each wait, to try in turn
# By what share of a forward a wait may grow, where a slowdown is allowed.
_OVERFILLS: Final = (0.5, 0.25, 0.1)
_MOST: Final = 32  # forwards of a device in a step: shorter ones are better batched
_ROUNDING: Final = 1e-9
_NUM_STEPS: Final = 4  # simulated; the last but one is as in a long run


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
    change. Updates of a step wait for all of its gradients, so that a device that is
    done early fills the time before its update.

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
        PlanError: the schedule is of several steps, or has several lanes on a device,
            or `costs` are by device.

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
    devices = [lane.device for lane in schedule.lanes]
    if schedule.body or program.num_steps != 1 or len(set(devices)) < len(devices):
        raise PlanError(
            f"the schedule is of {program.num_steps} steps in {len(devices)} lanes on "
            f"{len(set(devices))} devices: give an order of one step with one lane per "
            "device"
        )
    longest_s = long_step_s(schedule, costs) * (1.0 + max_slowdown + _ROUNDING)
    waits = _steady_waits(schedule, costs)
    trials = [
        *((1.0, overfill) for overfill in _OVERFILLS if max_slowdown),
        *((share, 0.0) for share in _SHARES),
    ]
    for share, overfill in trials:  # the fullest first
        counts = [
            _counts(lane_waits, _seconds(forwards[lane.device], costs), share, overfill)
            for lane, lane_waits in zip(schedule.lanes, waits, strict=True)
        ]
        filled = _filled(schedule, costs, forwards, counts)
        if long_step_s(*filled) <= longest_s:
            return filled
    return schedule, costs


def _steady_waits(schedule: Schedule, costs: Costs) -> list[list[float]]:
    """Return how long each lane waits before each of its ops, in a long run."""
    several = schedule.with_num_steps(_NUM_STEPS)
    timeline = simulate(several, costs, gates_of(several, clips=False))
    steady = _NUM_STEPS - 2
    return [
        of_lane[steady * len(lane.ops) : (steady + 1) * len(lane.ops)].tolist()
        for lane, of_lane in zip(schedule.lanes, waits_s(timeline, costs), strict=True)
    ]


def _seconds(forward: StageCost, costs: Costs) -> float:
    """Return how long a lane is busy with a forward; 0 if there is none."""
    return forward.forward_s + costs.op_s if forward.forward_s else 0.0


def _counts(
    lane_waits_s: Sequence[float], forward_s: float, share: float, overfill: float
) -> list[int]:
    """Return the number of forwards before each op of a lane.

    Args:
        lane_waits_s: how long the lane waits before each op.
        forward_s: the seconds of one forward.
        share: the share of each wait that is filled.
        overfill: the share of a forward by which a wait may become longer.
    """
    if not forward_s:
        return [0] * len(lane_waits_s)
    num_left, found = _MOST, []
    for wait_s in lane_waits_s:
        fits = int(share * wait_s / forward_s + overfill + _ROUNDING)
        found.append(min(num_left, fits))
        num_left -= found[-1]
    return found


def _filled(
    schedule: Schedule,
    costs: Costs,
    forwards: Sequence[StageCost],
    counts: Sequence[Sequence[int]],
) -> tuple[Schedule, Costs]:
    """Fill an order with so many forwards before each op of each lane."""
    program = schedule.program
    used = [n for n, before in enumerate(counts) if any(before)]
    if not used:
        return schedule, costs
    devices = [schedule.lanes[n].device for n in used]
    names = [f"{_NET}{device}" for device in devices]
    sums = [sum(counts[n]) for n in used]
    joint = replace(
        program,
        nets=(*program.nets, *map(Net, names, sums)),
        stages=(
            *program.stages,
            *(
                Stage(name, device, trainable=False)
                for name, device in zip(names, devices, strict=True)
            ),
        ),
    )
    stage_of = {n: program.num_stages + i for i, n in enumerate(used)}
    lanes = tuple(
        replace(lane, ops=tuple(_ops(lane, counts[n], stage_of[n])))
        if n in stage_of
        else lane
        for n, lane in enumerate(schedule.lanes)
    )
    stages = (*costs.stages, *(forwards[device] for device in devices))
    return Schedule(joint, lanes), replace(costs, stages=stages)


def _ops(lane: Lane, counts: Sequence[int], stage: int) -> Iterator[Op]:
    number = 0
    for op, count in zip(lane.ops, counts, strict=True):
        for _ in range(count):
            yield Op(Kind.FORWARD, stage, number)
            number += 1
        yield op


# op ├─ sends ─┼─ waits ─┼─ reads ─┤ op
def waits_s(timeline: Timeline, costs: Costs) -> list[Floats]:
    """Return the seconds that each lane waits before each of its ops.

    Args:
        timeline: a simulated one.
        costs: those that it was simulated with.
    """
    work = prepare(timeline.schedule, costs)
    sent_s = work.messages.handling_s.tolist()
    found = []
    for number, first in enumerate(work.columns.first[:-1]):
        start_s, end_s = timeline.start_s[number], timeline.end_s[number]
        goes_on = work.is_collective[first : first + start_s.size]  # the lane, at once
        free_s = np.where(goes_on, start_s, end_s)
        gaps_s = start_s - np.append(0.0, free_s[:-1])
        for i in range(gaps_s.size):
            row = first + i
            reads = slice(work.wait_from[row], work.wait_from[row + 1])
            gaps_s[i] -= sum(work.wait_handling_s[reads])
            if i and not goes_on[i - 1]:
                sends = slice(work.post_from[row - 1], work.post_from[row])
                gaps_s[i] -= sum(sent_s[x] for x in work.post_message[sends])
        found.append(np.maximum(gaps_s, 0.0))
    return found
