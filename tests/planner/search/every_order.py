"""Every order of a tiny program, one after another: an oracle for the search."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product

from hocket.core.costs import Costs
from hocket.core.dataflow import due_ops
from hocket.core.op import Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Lane, Schedule
from hocket.core.simulate import simulate
from hocket.errors import DeadlockError
from hocket.planner.search.problem import split_backward_ops

_PLACE = {
    Kind.FORWARD: 0,
    Kind.BACKWARD: 1,
    Kind.BACKWARD_INPUT: 1,
    Kind.BACKWARD_WEIGHT: 2,
    Kind.UPDATE: 3,
}


def least_makespan_s(
    program: Program,
    costs: Costs,
    *,
    split_backward: bool,
    memory_bytes: float = float("inf"),
) -> float:
    """The least of all orders that fit; infinite if none does.

    Args:
        program: of one step, with one stage per device.
        costs: of it.
        split_backward: into I and W.
        memory_bytes: of each device.
    """
    lanes = [
        [Lane(device, 0, ops) for ops in _lane_orders(program, device, split_backward)]
        for device in range(program.num_devices)
    ]
    return min(
        _makespan_s(Schedule(program, chosen), costs, memory_bytes)
        for chosen in product(*lanes)
    )


def _makespan_s(schedule: Schedule, costs: Costs, memory_bytes: float) -> float:
    try:
        timeline = simulate(schedule, costs)
    except DeadlockError:
        return float("inf")
    devices = range(schedule.program.num_devices)
    fits = all(timeline.peak_bytes(device) <= memory_bytes for device in devices)
    return timeline.makespan_s if fits else float("inf")


def _lane_orders(
    program: Program, device: int, split_backward: bool
) -> Iterator[tuple[Op, ...]]:
    """All orders of a device's ops in which each microbatch goes F, I, W."""
    ops = [op for op in due_ops(program) if op.stage == device]
    if split_backward:
        ops = [half for op in ops for half in split_backward_ops(op)]
    ends = tuple(op for op in ops if op.microbatch is None)
    for order in permutations(op for op in ops if op.microbatch is not None):
        seen = [0] * program.num_microbatches_of(device)
        for op in order:
            assert op.microbatch is not None
            if _PLACE[op.kind] != seen[op.microbatch]:
                break
            seen[op.microbatch] += 1
        else:
            yield (*order, *ends)
