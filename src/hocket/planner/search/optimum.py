"""`hocket.search`: the best order of a small program, a bound for a large one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from math import ceil, floor, inf, lcm
from time import perf_counter
from typing import Final

from hocket.core.costs import Costs, StageCost
from hocket.core.op import (
    BACKWARDS,
    MESSAGES,
    SPLIT_BACKWARD,
    WHOLE_OR_SPLIT_BACKWARD,
    Kind,
    Op,
)
from hocket.core.program import Program
from hocket.core.schedule import Lane, Schedule
from hocket.core.simulate import simulate
from hocket.core.simulator.memory import always_bytes
from hocket.draw.quantity import byte_size
from hocket.errors import FitError, PlanError
from hocket.passes.delay_weight_gradients import delay_weight_gradients
from hocket.passes.split_backward import split_backward as split
from hocket.planner.search.model import (
    Holding,
    SolverQuery,
    ask,
    holdings,
    require_ortools,
)
from hocket.planner.search.problem import (
    Problem,
    StartLag,
    TimedTask,
    bound_s,
    in_order,
)
from hocket.planner.search.result import SAME, SearchProgress, SearchResult
from hocket.schedules import SCHEDULES, Shape

Report = Callable[[SearchProgress], None]

_MOST_OPS: Final = 5_000  # of a program that is given to the solver
_NEAR: Final = 1e-6  # of a tick: bounds come as floating point
_MOST: Final = 10**8  # ticks of all work together; then their products fit 64 bits
_MOST_PARTS: Final = 1000  # of the longest time, in which simple times are counted


# Times become whole numbers for CP-SAT, or are rounded down: then no order becomes
# impossible and none takes longer, so that a bound in ticks is a bound in seconds.
def tick_of(seconds: Iterable[float], total_s: float) -> float:
    """Return the largest tick in which all times are whole, or a fine one; in seconds.

    Args:
        seconds: times that are to be whole.
        total_s: the longest time.

    >>> tick_of([1.0, 0.5, 0.3], 100.0)
    0.1
    """
    times = {time for time in seconds if time > 0}
    if not times:
        return 1.0
    longest = max(times)
    parts = [Fraction(time / longest).limit_denominator(_MOST_PARTS) for time in times]
    is_simple = all(
        abs(float(part) * longest - time) < _NEAR * time
        for part, time in zip(parts, times, strict=True)
    )
    tick_s = longest / lcm(*(part.denominator for part in parts))
    is_fine = is_simple and total_s < _MOST * tick_s
    return tick_s if is_fine else max(total_s, longest) / _MOST


def search(
    program: Program,
    costs: Costs,
    memory_bytes: int | None = None,
    *,
    split_backward: bool = True,
    time_limit_s: float = 60.0,
    num_threads: int = 2,
    progress: Report | None = None,
) -> SearchResult:
    """Search for the fastest order of a program's work, and bound how good it is.

    It begins with the published orders of the program and a bound that takes no
    search; where they meet, it ends at once. Else CP-SAT looks for faster orders and
    for a higher bound until both meet, or time is up. Programs of more than 5,000 ops
    are not given to it: of those, the result is the best published order, and the
    bound.

    Args:
        program: what must be computed.
        costs: the program's costs. Their jitter is ignored.
        memory_bytes: the memory of each device; no limit when not given.
        split_backward: whether I and W may be separate ops. With False, backwards are
            whole.
        time_limit_s: how long to search.
        num_threads: threads of the solver.
        progress: called with each better order, and each higher bound; maybe in another
            thread.

    Raises:
        MissingPackageError: OR-tools is not installed (`pip install 'hocket[search]'`).
        FitError: no order fits the memory; it names the least that one fits.
        CostsError: the costs do not fit the program.

    >>> from hocket import Costs, Program
    >>> found = search(Program.chain([0, 1], 3), Costs.uniform())
    >>> found.makespan_s, found.is_optimal
    (10.0, True)
    """
    require_ortools()
    hunt = _Search(program, costs, memory_bytes, split_backward, progress)
    return hunt.run(time_limit_s, num_threads)


class _Search:
    """One search: the best order so far, and the bound."""

    def __init__(
        self,
        program: Program,
        costs: Costs,
        memory_bytes: int | None,
        split_backward: bool,
        report: Report | None,
    ) -> None:
        self.begin_s = perf_counter()
        self.costs = replace(costs, jitter=0.0)
        self.memory_bytes = memory_bytes
        self.split_backward = split_backward
        self.report = report
        self.problem = Problem.of(program, self.costs, split_backward=split_backward)
        self.bound_s = bound_s(program, self.costs, split_backward=split_backward)
        self.best: Schedule | None = None
        self.best_s = inf
        self.least: tuple[int, int] | None = None  # bytes, and the device
        serial_s = sum(task.taken_s for task in self.problem.tasks)
        serial_s += sum(_longest_lags(self.problem.waits).values())
        parts = {part for task in self.problem.tasks for part in task[1:]}
        lags = {wait.lag_s for wait in self.problem.waits}
        self.tick_s = tick_of(parts | lags, serial_s)
        self.serial_s = serial_s

    def run(self, time_limit_s: float, num_threads: int) -> SearchResult:
        """Try known orders first, then the solver."""
        until_s = self.begin_s + time_limit_s
        for schedule in self._known_orders():
            self._keep_if_best(schedule)
            if self._is_proved_best() or perf_counter() >= until_s:
                break
        if not self._is_proved_best() and len(self.problem.ops) <= _MOST_OPS:
            self._solve(until_s, num_threads)
        if self.best is None:
            raise self._refusal()
        elapsed_s = perf_counter() - self.begin_s
        return SearchResult(self.best, self.best_s, self.bound_s, elapsed_s)

    def _known_orders(self) -> Iterator[Schedule]:
        """Yield one microbatch after another, every published order, and delayed W."""
        costs, memory_bytes = self.costs, self.memory_bytes
        yield one_by_one(self.problem)
        given = {"costs": costs, "memory_bytes": memory_bytes}
        published = [*_published(self.problem.program, given, self.split_backward)]
        if not self.split_backward:
            yield from published
            return
        yield from map(_split, published)
        for order in published:
            with suppress(PlanError):  # it may not fit, however soon W come
                delayed = delay_weight_gradients(
                    order, costs, memory_bytes=memory_bytes
                )
                yield _split(delayed)

    def _is_proved_best(self) -> bool:
        return self.best_s <= self.bound_s * (1 + SAME)

    def _solve(self, until_s: float, num_threads: int) -> None:
        """Search for the fastest order; for one that fits, if none is known.

        What waits in queues is not in the first question, so that it leaves out no
        order that fits, and its bound holds. Where that takes too much, it is in the
        next; and if it still does, there is so much less memory in those that follow.
        """
        limit, counts_queues = self.memory_bytes, False
        on_bound: Callable[[float], None] = self._raise_bound
        while True:
            question = self._question(limit, counts_queues=counts_queues)
            left_s = until_s - perf_counter()
            starts = ask(question, left_s, num_threads, self._better_schedule, on_bound)
            missing = self._better_schedule(starts) if starts else 0
            is_late = perf_counter() >= until_s
            if limit is None or not missing or is_late or self._is_proved_best():
                break
            limit -= missing if counts_queues else 0
            counts_queues, on_bound = True, _nothing
        if self.best is None:
            self._ask_for_least(until_s - perf_counter(), num_threads)

    def _ask_for_least(self, left_s: float, num_threads: int) -> None:
        """Search for the order with least memory, if none that fits is known."""
        question = self._question(None, counts_queues=True, seeks_memory=True)
        if left_s > 0:
            ask(question, left_s, num_threads, self._better_schedule, _nothing)

    def _better_schedule(self, starts: tuple[int, ...]) -> int:
        return self._keep_if_best(schedule_at(self.problem, starts))

    def _keep_if_best(self, schedule: Schedule) -> int:
        """Simulate an order and keep it if it is the best; return missing bytes."""
        timeline = simulate(schedule, self.costs)
        if self.memory_bytes is not None:
            devices = range(schedule.program.num_devices)
            peak = max((round(timeline.peak_bytes(d)), d) for d in devices)
            self.least = peak if self.least is None else min(self.least, peak)
            if peak[0] > self.memory_bytes:
                return peak[0] - self.memory_bytes
        if timeline.makespan_s < self.best_s:
            self.best, self.best_s = schedule, timeline.makespan_s
            self._report_progress()
        return 0

    def _raise_bound(self, ticks: float) -> None:
        new_s = ceil(ticks - _NEAR) * self.tick_s
        if new_s > self.bound_s:
            self.bound_s = min(new_s, self.best_s)
            self._report_progress()

    def _report_progress(self) -> None:
        if self.report is not None:
            elapsed_s = perf_counter() - self.begin_s
            self.report(SearchProgress(elapsed_s, self.best_s, self.bound_s))

    def _question(
        self, limit: int | None, *, counts_queues: bool, seeks_memory: bool = False
    ) -> SolverQuery:
        problem, count = self.problem, self._count
        always = always_bytes(problem.program, self.costs.of(problem.program))
        rooms = None if limit is None else [limit - size for size in always]
        waits = [*problem.waits, *problem.microbatch_waits()]
        if rooms is not None:
            waits += memory_waits(problem, self.costs, rooms)
        known_s = self.serial_s if self.best is None else self.best_s
        hint: list[int] = []
        if self.best is not None:
            times = starts_of(problem, self.best, self.costs)
            hint = [count(time_s) for time_s in times]
        held: tuple[Holding, ...] = ()
        if rooms is not None or seeks_memory:
            held = holdings(problem, self.costs, counts_queues=counts_queues)
        return SolverQuery(
            [TimedTask(task[0], *map(count, task[1:])) for task in problem.tasks],
            len(problem.ops),
            [StartLag(before, after, count(lag_s)) for before, after, lag_s in waits],
            count(self.bound_s),
            count(known_s),
            hint,
            held,
            rooms,
            always,
        )

    def _count(self, seconds: float) -> int:
        """Return whole ticks, rounded down."""
        return floor(seconds / self.tick_s + _NEAR)

    def _refusal(self) -> PlanError:
        assert self.least is not None  # without a limit, every order fits
        assert self.memory_bytes is not None
        needed, device = self.least
        return FitError(
            f"no order of this program that was found fits {self.memory_bytes:,} bytes "
            f"per device ({byte_size(self.memory_bytes)}): device {device} needs "
            f"{needed:,} bytes ({byte_size(needed)}) in the order that takes least. "
            "Use that, more devices, smaller microbatches, or recomputation",
            device=device,
            needed_bytes=needed,
            memory_bytes=self.memory_bytes,
        )


def _longest_lags(waits: tuple[StartLag, ...]) -> dict[int, float]:
    """Return, by task, the longest lag after all others have ended."""
    lags: dict[int, float] = {}
    for _, after, lag_s in waits:
        lags[after] = max(lags.get(after, 0.0), lag_s)
    return lags


def _nothing(_: float) -> None:
    """Do nothing, for queries whose bound does not concern the first one."""


#     d0   0F0 0F1 0F2 │ 0I0 0W0 0F3 ...      room for three: 0F3 waits for 0I0, and for
#                                             0W0 where what waits for W fills it, too
#
# The solver's query implies all of this; as explicit waits it makes the longest paths
# longer, and so raises the bound.
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


# Converts start times to orders and back, and makes orders without a search.
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
        program.num_shards,
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
        if schedule.program == program and not schedule.kinds & refused:
            yield schedule


def _split(schedule: Schedule) -> Schedule:
    """Return the order with all backwards split, and without a body."""
    return replace(split(schedule), body=(), num_repeats=0)
