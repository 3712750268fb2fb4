"""Waits that follow from full devices, found without a search.

    d0   0F0 0F1 0F2 │ 0I0 0W0 0F3 ...      room for three: 0F3 waits for 0I0, and for
                                            0W0 where what waits for W fills it, too

The solver's query implies all of this; as explicit waits it makes the longest paths
longer, and so raises the bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hocket.core.costs import Costs, StageCost
from hocket.core.op import BACKWARDS, Kind, Op
from hocket.planner.search.problem import Problem, StartLag


def memory_waits(
    problem: Problem, costs: Costs, room_bytes: Sequence[int]
) -> Iterator[StartLag]:
    """Return, for each forward, which I and W must have ended before it.

    Args:
        problem: the program's ops.
        costs: the program's costs.
        room_bytes: the memory of each device for what is allocated and released.
    """
    program, tasks = problem.program, problem.tasks
    stage_costs = costs.of(program)
    rows = {op: row for row, op in enumerate(problem.ops)}
    for row, op in enumerate(problem.ops):
        room = room_bytes[program.stages[op.stage].device]
        num = _num_before_full(op.kind, stage_costs[op.stage], room)
        if num < 1 or op.microbatch is None:
            continue
        next_one = Op(Kind.FORWARD, op.stage, op.microbatch + num, op.step)
        later = rows.get(next_one)
        if later is not None:
            lag_s = tasks[row].seconds + tasks[row].after_s + tasks[later].before_s
            yield StartLag(row, later, lag_s)


def _num_before_full(kind: Kind, cost: StageCost, room: int) -> int:
    """Return how many forwards later an op must have ended; 0 if never."""
    kept = cost.kept_bytes
    if kind in BACKWARDS and kept:
        return room // kept
    held = min(kept, cost.weight_grad_held_bytes)
    if kind is Kind.BACKWARD_WEIGHT and held:
        # Beside the new one, each that waits for W holds so much, or more.
        return (room - kept) // held + 1
    return 0
