"""One query to OR-tools' CP-SAT: the fastest order, or the one with least memory.

    lane       d0  ├ 0F0 ┤├ 0F1 ┤      ├ 0I0 ┤├ 0W0 ┤      at most one op at a time
    waits                └────── lag ──▶                   start after start
    memory         ├───────────────────────────┤ 0F0       at most so many bytes
                           ├───────────────────── 0F1      at a time

Sources: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, appendix G,
for the same as an integer program; Perron and Didier, CP-SAT (OR-tools).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from hocket.core.costs import Costs, StageCost
from hocket.core.op import BACKWARDS, Kind, Op
from hocket.core.simulator.needs import LOCAL
from hocket.errors import MissingPackageError
from hocket.planner.search.problem import Paths, Problem, StartLag, TimedTask

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


_MOST_UNITS: Final = 10**6  # of memory; more are rounded down, so that nothing is lost


@dataclass(frozen=True, slots=True, eq=False)
class SolverQuery:
    """The query. All times are in ticks.

    Args:
        tasks: the tasks, with the resource that each takes.
        num_ops: the first so many are ops, whose ends make the makespan.
        waits: the lags between tasks.
        least: no makespan is below it.
        most: nothing ends later.
        hint: the start of each op in a known order; empty if there is none.
        holdings: the allocations; empty if memory is unlimited.
        room_bytes: each device's memory for what is allocated and released; None to
            minimize it.
        always_bytes: each device's memory beside that.
    """

    tasks: Sequence[TimedTask]
    num_ops: int
    waits: Sequence[StartLag]
    least: int
    most: int
    hint: Sequence[int] = ()
    holdings: Sequence[Holding] = ()
    room_bytes: Sequence[int] | None = None
    always_bytes: Sequence[int] = ()


def require_ortools() -> None:
    """Raise MissingPackageError unless OR-tools is installed.

    Raises:
        MissingPackageError: OR-tools is not installed.
    """
    try:
        import ortools.sat.python.cp_model  # noqa: F401
    except ImportError:
        raise MissingPackageError(
            "the search for the best order needs OR-tools, which is not installed: "
            "pip install 'hocket[search]'"
        ) from None


def ask(
    question: SolverQuery,
    time_limit_s: float,
    num_threads: int,
    on_order: Callable[[tuple[int, ...]], object],
    on_bound: Callable[[float], None],
) -> tuple[int, ...]:
    """Solve a query until the answer is proved to be best, or time is up.

    Args:
        question: the query.
        time_limit_s: the time for it.
        num_threads: the solver's threads.
        on_order: called with the starts of each better order.
        on_bound: called with each higher bound: ticks, or bytes if memory is minimized.

    Returns:
        The start of each op in the best order, in ticks; empty if none was found.
    """
    paths = Paths.of([task.seconds for task in question.tasks], question.waits)
    if paths.longest_s > question.most or min(question.room_bytes or (0,)) < 0:
        return ()
    model = _Model(question, paths)
    cp, ops = model.cp, model.starts[: question.num_ops]

    class _OnSolution(cp.CpSolverSolutionCallback):  # type: ignore[misc, name-defined]
        def on_solution_callback(self) -> None:
            on_order(tuple(self.value(start) for start in ops))

    solver = cp.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.1, time_limit_s)
    solver.parameters.num_workers = num_threads
    solver.parameters.random_seed = 0
    solver.best_bound_callback = lambda bound: on_bound(bound * model.unit_bytes)
    status = solver.solve(model.model, _OnSolution())
    if status not in (cp.OPTIMAL, cp.FEASIBLE):
        return ()
    on_bound(solver.best_objective_bound * model.unit_bytes)
    return tuple(solver.value(start) for start in ops)


class _Model:
    """The query as a CP-SAT model."""

    def __init__(self, question: SolverQuery, paths: Paths) -> None:
        from ortools.sat.python import cp_model

        self.cp = cp_model
        self.question = question
        self.model = cp_model.CpModel()
        self.unit_bytes = 1
        self.starts = [
            self.model.new_int_var(int(head), question.most - int(tail), "")
            for head, tail in zip(paths.head_s, paths.tail_s, strict=True)
        ]
        self._take_turns()
        for before, after, lag in question.waits:
            self.model.add(self.starts[after] >= self.starts[before] + int(lag))
        makespan = self._end_of_all(paths)
        if question.holdings:
            self._keep_within_memory()
        if question.room_bytes is not None or not question.holdings:
            self.model.minimize(makespan)
        for start, time in zip(self.starts, question.hint, strict=False):
            self.model.add_hint(start, time)

    def _take_turns(self) -> None:
        """Let each resource run one task at a time."""
        turns: defaultdict[int, list[cp_model.IntervalVar]] = defaultdict(list)
        for start, task in zip(self.starts, self.question.tasks, strict=True):
            begin = start - int(task.before_s)
            turns[task.resource].append(
                self.model.new_fixed_size_interval_var(begin, int(task.taken_s), "")
            )
        for intervals in turns.values():
            self.model.add_no_overlap(intervals)

    def _end_of_all(self, paths: Paths) -> cp_model.IntVar:
        question = self.question
        least = max(question.least, int(paths.longest_s))
        makespan = self.model.new_int_var(least, max(least, question.most), "makespan")
        followed = {wait.before for wait in question.waits}
        for row in range(question.num_ops):
            if row not in followed:
                end = self.starts[row] + int(question.tasks[row].seconds)
                self.model.add(makespan >= end)
        return makespan

    def _keep_within_memory(self) -> None:
        question = self.question
        held: defaultdict[int, list[Holding]] = defaultdict(list)
        for holding in question.holdings:
            held[holding.device].append(holding)
        rooms = question.room_bytes
        if rooms is None:
            # The least memory that suffices for every device, as one number.
            self.unit_bytes = _unit_bytes(question, question.always_bytes)
            most = sum(holding.num_bytes for holding in question.holdings)
            most += max(question.always_bytes)
            memory = self.model.new_int_var(0, 1 + most // self.unit_bytes, "memory")
            self.model.minimize(memory)
        for device, of_one in held.items():
            if rooms is None:
                unit = self.unit_bytes
                room: Any = memory - question.always_bytes[device] // unit
            else:
                unit = _unit_bytes(question, rooms)
                room = rooms[device] // unit
            intervals = [self._interval(holding) for holding in of_one]
            units = [holding.num_bytes // unit for holding in of_one]
            self.model.add_cumulative(intervals, units, room)

    def _interval(self, holding: Holding) -> cp_model.IntervalVar:
        begin, end = holding.begin, holding.end
        if begin == Instant(end.row, False):
            size = int(self.question.tasks[end.row].seconds)
            return self.model.new_fixed_size_interval_var(
                self.starts[end.row], size, ""
            )
        length = self.model.new_int_var(0, self.question.most, "")
        return self.model.new_interval_var(self._at(begin), length, self._at(end), "")

    def _at(self, instant: Instant | None) -> cp_model.LinearExprT:
        if instant is None:
            return 0
        seconds = self.question.tasks[instant.row].seconds if instant.is_end else 0
        return self.starts[instant.row] + int(seconds)


def _unit_bytes(question: SolverQuery, more: Iterable[int]) -> int:
    """Return a unit in which all bytes are whole, or nearly."""
    sizes = [*(holding.num_bytes for holding in question.holdings), *more]
    common = gcd(*sizes)
    largest = max(abs(size) for size in sizes)
    if largest <= _MOST_UNITS * common:
        return common
    return -(-largest // _MOST_UNITS)


# Which ops hold memory from when to when, without a clock.
#
# `core/simulator/memory.py` says what is held and for how long; here are those of its
# rows that the order of one lane decides. A message is counted from when it is read,
# not from when it is on its way, unless asked for: so no order that fits is lost, and
# what the queues hold is seen when an order is simulated. Left to that, too: older
# versions of weights.
class Instant(NamedTuple):
    """The start or the end of an op, by its row."""

    row: int
    is_end: bool


class Holding(NamedTuple):
    """Bytes on a device, from one instant to another.

    Args:
        device: the device.
        begin: when they are allocated; None if they are there from the beginning.
        end: when they are released, before allocations at the same instant; None if
            never.
        num_bytes: the bytes; at least 1.
    """

    device: int
    begin: Instant | None
    end: Instant
    num_bytes: int


def holdings(
    problem: Problem, costs: Costs, *, counts_queues: bool = False
) -> tuple[Holding, ...]:
    """Return everything that is allocated and released.

    Args:
        problem: the program's ops.
        costs: the program's costs.
        counts_queues: count messages from when they are made, not from when they are
            read. Then a lane could make room by waiting, which no lane does.
    """
    rows = _HoldingRows(problem, costs)
    found = (*rows.of_ops(), *rows.received(counts_queues), *rows.kept_outputs())
    return tuple(holding for holding in found if holding.num_bytes > 0)


class _HoldingRows:
    """The ops by name, and what each of them holds."""

    def __init__(self, problem: Problem, costs: Costs) -> None:
        self.problem = problem
        self.row = {op: row for row, op in enumerate(problem.ops)}
        self.costs = costs.of(problem.program)
        self.accumulates = costs.accumulates

    def of_ops(self) -> Iterator[Holding]:
        for row, op in enumerate(self.problem.ops):
            cost = self.costs[op.stage]
            yield self._from_to(Instant(row, False), row, _at_work(op, cost))
            match op.kind:
                case Kind.FORWARD if self._trains(op):
                    begin, back = Instant(row, False), self._backward(op)
                    yield self._from_to(begin, back, cost.kept_bytes)
                case Kind.FORWARD:
                    begin = Instant(row, False)
                    yield self._from_to(begin, row, cost.activation_bytes)
                case Kind.BACKWARD_WEIGHT:
                    begin = Instant(self._backward(op), True)
                    yield self._from_to(begin, row, cost.weight_grad_held_bytes)
                case Kind.UPDATE if self._trains(op):
                    first = None if self.accumulates else self._first_gradient(op)
                    yield self._from_to(first, row, cost.gradient_bytes)
                case _:
                    pass

    def received(self, counts_queues: bool) -> Iterator[Holding]:
        """Yield received messages, until their last use."""
        needs, messages = self.problem.work.needs, self.problem.work.messages
        seen: set[int] = set()
        columns = needs.row.tolist(), needs.maker.tolist(), needs.arrival.tolist()
        for row, maker, arrival in zip(*columns, strict=True):
            if arrival != LOCAL and arrival not in seen:
                seen.add(arrival)
                num_bytes = int(messages.num_bytes[arrival])
                begin = Instant(maker, True) if counts_queues else Instant(row, False)
                yield self._from_to(begin, self._release(row), num_bytes)

    def kept_outputs(self) -> Iterator[Holding]:
        """Yield outputs that another stage of the same device reads."""
        needs, ops = self.problem.work.needs, self.problem.ops
        columns = needs.row.tolist(), needs.maker.tolist(), needs.arrival.tolist()
        seen: set[int] = set()
        for row, maker, arrival in zip(*columns, strict=True):
            if arrival != LOCAL or maker < 0 or maker in seen:
                continue
            made = ops[maker]
            if made.stage == ops[row].stage or made.kind is Kind.UPDATE:
                continue
            seen.add(maker)
            cost = self.costs[made.stage]
            is_output = made.kind is Kind.FORWARD
            num_bytes = cost.output_bytes if is_output else cost.input_grad_bytes
            yield self._from_to(Instant(maker, True), self._release(row), num_bytes)

    def _from_to(self, begin: Instant | None, row: int, num_bytes: int) -> Holding:
        stage = self.problem.ops[row].stage
        device = self.problem.program.stages[stage].device
        return Holding(device, begin, Instant(row, True), num_bytes)

    def _trains(self, op: Op) -> bool:
        return self.problem.program.stages[op.stage].trainable

    def _find(self, op: Op, kinds: Sequence[Kind]) -> int:
        """Return the row of the same microbatch's op of the first of these kinds."""
        others = (Op(kind, op.stage, op.microbatch, op.step) for kind in kinds)
        return next(self.row[other] for other in others if other in self.row)

    def _backward(self, op: Op) -> int:
        return self._find(op, (Kind.BACKWARD, Kind.BACKWARD_INPUT))

    def _release(self, row: int) -> int:
        """Return the last op that uses what this one read."""
        op = self.problem.ops[row]
        if op.kind is not Kind.FORWARD or not self._trains(op):
            return row
        if self.costs[op.stage].holds_input:
            return self._find(op, _MAKES_WEIGHT_GRAD)
        return self._backward(op)

    def _first_gradient(self, update: Op) -> Instant:
        """Return the step's first gradient: microbatches go in order."""
        first = Op(Kind.FORWARD, update.stage, 0, update.step)
        return Instant(self._find(first, _MAKES_WEIGHT_GRAD), True)


_MAKES_WEIGHT_GRAD: Final = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


def _at_work(op: Op, cost: StageCost) -> int:
    """Return what an op holds only while it runs."""
    again = cost.activation_bytes - cost.kept_bytes if op.kind in BACKWARDS else 0
    return again + cost.work_bytes(op.kind)
