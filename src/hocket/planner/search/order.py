"""Converts start times to orders and back, and makes orders without a search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf

from hocket.core.costs import Costs
from hocket.core.op import MESSAGES, SPLIT_BACKWARD, WHOLE_OR_SPLIT_BACKWARD, Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Lane, Schedule
from hocket.core.simulate import simulate
from hocket.errors import PlanError
from hocket.passes.delay_weight_gradients import delay_weight_gradients
from hocket.passes.split_backward import split_backward as split
from hocket.planner.search.paths import in_order
from hocket.planner.search.problem import Problem
from hocket.schedules import SCHEDULES, Shape


def schedule_at(problem: Problem, start: Sequence[float]) -> Schedule:
    """Return the order in which ops start at these times.

    A reduction only starts something: its lane reaches it as soon as it may begin.

    Args:
        problem: the program's ops.
        start: the earliest start of each op; in any unit.
    """
    keys = [(start[row], 0, start[row]) for row in range(len(problem.ops))]
    for before, after, _ in problem.waits:
        if after < len(keys) and problem.work.is_collective[after]:
            ready = start[before]
            known = keys[after][0] if keys[after][1] else ready
            keys[after] = max(known, ready), 1, start[after]
    return _lanes(problem, keys)


def starts_of(problem: Problem, schedule: Schedule, costs: Costs) -> list[float]:
    """Return when each op starts in an order, in seconds.

    Args:
        problem: a problem with as many ops of each kind as the schedule.
        schedule: any order of the program.
        costs: the program's costs.
    """
    spans = simulate(schedule, costs).spans
    start_of = {span.op: span.start_s for span in spans}
    start_s = [start_of[op] for op in problem.ops]
    for numbers in problem.sequences():
        rows = [row for row in numbers if row < len(start_s)]
        for row, time_s in zip(rows, sorted(start_s[r] for r in rows), strict=True):
            start_s[row] = time_s
    return start_s


def known_orders(
    problem: Problem,
    costs: Costs,
    *,
    memory_bytes: int | None,
    split_backward: bool,
) -> Iterator[Schedule]:
    """Yield one microbatch after another, every published order, and delayed W.

    Args:
        problem: the program's ops.
        costs: the costs, for orders that depend on them.
        memory_bytes: the memory of each device, for orders that depend on it.
        split_backward: whether the backwards are to be split, or whole.
    """
    yield one_by_one(problem)
    given = {"costs": costs, "memory_bytes": memory_bytes}
    published = [*_published(problem.program, given, split_backward)]
    if not split_backward:
        yield from published
        return
    yield from map(_split, published)
    for schedule in published:
        with suppress(PlanError):  # it may not fit, however soon W come
            delayed = delay_weight_gradients(schedule, costs, memory_bytes=memory_bytes)
            yield _split(delayed)


def one_by_one(problem: Problem) -> Schedule:
    """Return the order with the fewest activations: one microbatch after another."""
    keys = [_place(op) for op in problem.ops]
    return _lanes(problem, keys)


def _place(op: Op) -> tuple[float, ...]:
    is_back = op.kind in WHOLE_OR_SPLIT_BACKWARD
    microbatch = inf if op.microbatch is None else op.microbatch
    depth = -op.stage if is_back else op.stage
    return op.step, microbatch, is_back, depth, op.kind is Kind.BACKWARD_WEIGHT


def _lanes(problem: Problem, keys: Sequence[tuple[float, ...]]) -> Schedule:
    """Return each device's ops after all that they wait for, else by the lowest key."""
    program = problem.program
    lanes: list[list[Op]] = [[] for _ in range(program.num_devices)]
    of_messages = (keys[row] for row in problem.rows[len(keys) :])
    for task in in_order([*keys, *of_messages], problem.waits):
        if task < len(problem.ops):
            op = problem.ops[task]
            lanes[program.stages[op.stage].device].append(op)
    return Schedule(
        program, tuple(Lane(d, 0, tuple(ops)) for d, ops in enumerate(lanes))
    )


def _shape(program: Program) -> Shape | None:
    """Return the shape that a published order of this program would be made for."""
    per_device, rest = divmod(program.num_stages, program.num_devices)
    if rest or len(program.nets) != 1:
        return None
    return Shape(
        program.num_devices,
        program.nets[0].num_microbatches,
        per_device,
        program.num_steps,
        program.num_replicas,
    )


def _published(
    program: Program, given: Mapping[str, object], split_backward: bool
) -> Iterator[Schedule]:
    """Yield the schedules of the table that fit this program.

    Messages are left out.
    """
    shape = _shape(program)
    refused = MESSAGES if split_backward else MESSAGES | {*SPLIT_BACKWARD}
    for entry in SCHEDULES.values() if shape else ():
        options = {name: x for name, x in given.items() if name in entry.options}
        try:
            schedule = entry.make(shape, **options)
        except PlanError:
            continue
        kinds = {op.kind for lane in schedule.lanes for op in lane.ops}
        if schedule.program == program and not kinds & refused:
            yield schedule


def _split(schedule: Schedule) -> Schedule:
    """Return the order with all backwards split, and without a body."""
    return replace(split(schedule), body=(), num_repeats=0)
