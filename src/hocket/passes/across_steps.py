"""Run weight gradients and updates of some stages in the next step's forward.

    lane 0   F0 F1 F2 F3 │ I3 I2 I1 I0 ║ F0 F1 F2 F3 │ I3 I2 I1 I0 ║
    lane 1               │    W1 U1 W0 U0 ║ W2 U2 W3 U3 │ W1 U1 W0 U0 ║ W2 U2 ...

Lane 1 has nothing to do in the forward. Some W wait for it, of the last stages where
that is enough: their weights are read last in the next forward, and F of a stage waits
for its U. No weight is old. What these W read is kept until then.

Source: Oh, Lee, Kim and Seo, "Out-of-Order BackProp", EuroSys 2022, whose tables place
the last 32 convolutions of DenseNet-121 so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from heapq import heappop, heappush
from typing import Final

from hocket.core.op import Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Lane, Schedule
from hocket.core.simulate import simulate
from hocket.passes.beside_critical_path import MeasuredProgram
from hocket.passes.serial import gradient_and_update

_NUM_PARTS: Final = 8  # one to seven eighths of the stages are tried
_NUM_STEPS: Final = 4  # that are simulated; the first and the last are incomplete


def carry_weight_gradients(measured: MeasuredProgram) -> Schedule:
    """Return the part that repeats, the fastest of some, as simulated.

    The W of the last stages wait, of a few numbers of stages; or those that are left
    when lane 1 always takes the W whose weight is read first.

    Args:
        measured: the program of one step.
    """
    program, costs = measured.program, measured.costs
    num = program.num_stages
    in_turn = range(num - 1, -1, -1)
    counts = {max(1, round(num * i / _NUM_PARTS)) for i in range(1, _NUM_PARTS)}
    parts = [_repeated(program, range(num - n, num), in_turn) for n in sorted(counts)]
    order, left = _first_read_first(measured)
    if left:
        parts.append(_repeated(program, left, order))
    return min(parts, key=lambda part: simulate(several_steps(part), costs).step_s)


def _first_read_first(measured: MeasuredProgram) -> tuple[list[int], list[int]]:
    """Return the stages in the order of their W in lane 1, and those that are left.

    Lane 1 takes, whenever it is free, that of the W whose I is done whose weight the
    next forward reads first.
    """
    costs = measured.costs.of(measured.program)
    stages = range(measured.program.num_stages)
    now_s = side_s = sum(cost.forward_s for cost in costs)
    order: list[int] = []
    ready: list[int] = []
    for stage in reversed(stages):
        now_s += costs[stage].seconds(Kind.BACKWARD_INPUT)
        while ready and side_s < now_s:
            order.append(heappop(ready))
            cost = costs[order[-1]]
            side_s += cost.seconds(Kind.BACKWARD_WEIGHT) + cost.update_s
        side_s = max(side_s, now_s) if not ready else side_s
        heappush(ready, stage)
    while ready and ready[0] == 0:  # the next forward begins with it
        order.append(heappop(ready))
    return [*order, *ready], ready


def _repeated(
    program: Program, waiting: Collection[int], order: Iterable[int]
) -> Schedule:
    """Return the part that repeats.

    Args:
        program: the program of one step.
        waiting: the stages whose W and U are carried over.
        order: all stages, in the order of their W.
    """
    stages = range(program.num_stages)
    main = [Op(Kind.FORWARD, stage, 0, 1) for stage in stages]
    main += [Op(Kind.BACKWARD_INPUT, stage, 0, 1) for stage in reversed(stages)]
    side = [op for stage in sorted(waiting) for op in gradient_and_update(stage)]
    for stage in order:
        if stage not in waiting:
            side += [replace(op, step=1) for op in gradient_and_update(stage)]
    lanes = Lane(0, 0, tuple(main)), Lane(0, 1, tuple(side))
    return Schedule(replace(program, num_steps=2), lanes)


def several_steps(part: Schedule, num_steps: int = _NUM_STEPS) -> Schedule:
    """Return the whole order of some steps.

    Args:
        part: the part that repeats, with ops of step 1, and of step 0 carried over.
        num_steps: the number of steps, 2 or more.
    """
    lanes, body = [], []
    for lane in part.lanes:
        first = [op.later(-1) for op in lane.ops if op.step]
        middle = [op.later(step) for step in range(num_steps - 1) for op in lane.ops]
        last = [op.later(num_steps - 1) for op in lane.ops if not op.step]
        lanes.append(replace(lane, ops=(*first, *middle, *last)))
        body.append((len(first), len(first) + len(middle)))
    program = replace(part.program, num_steps=num_steps)
    return Schedule(program, tuple(lanes), tuple(body), num_steps - 1)
