"""Every op and message of a program: durations, resources and waits.

    resource   does one thing at a time: a lane, a device's reductions, a link
    task       what it does: an op; or a message, on a link where its bytes take time
    wait       a task starts no earlier than so long after the start of another

Needs and messages come from the simulator, which asks dataflow.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any, NamedTuple

from hocket.core.costs import Costs
from hocket.core.dataflow import due_ops
from hocket.core.op import SPLIT_BACKWARD, Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Lane, Schedule
from hocket.core.simulator.needs import LOCAL
from hocket.core.simulator.work import Work, prepare


class TimedTask(NamedTuple):
    """An op or message that takes time on a resource.

    Args:
        resource: the resource.
        before_s: how long before its start it takes the resource (a lane receives
            messages).
        seconds: how long it takes.
        after_s: how long after its end it takes the resource (a lane sends messages).
    """

    resource: int
    before_s: float
    seconds: float
    after_s: float

    @property
    def taken_s(self) -> float:
        """How long the resource is taken."""
        return self.before_s + self.seconds + self.after_s


class StartLag(NamedTuple):
    """Task `after` starts at least `lag_s` after the start of task `before`."""

    before: int
    after: int
    lag_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A program without an order.

    Args:
        work: the simulator's data, in an arbitrary order of ops.
        ops: row after row of `work`.
        tasks: one task per op, in the order of `ops`; then those of messages.
        rows: for each task, the op that it is, or whose result it carries.
        waits: the lags that the program implies.
    """

    work: Work
    ops: tuple[Op, ...]
    tasks: tuple[TimedTask, ...]
    rows: tuple[int, ...]
    waits: tuple[StartLag, ...]

    @property
    def program(self) -> Program:
        """The program."""
        return self.work.schedule.program

    @property
    def seconds(self) -> tuple[float, ...]:
        """The seconds of each task."""
        return tuple(task.seconds for task in self.tasks)

    @classmethod
    def of(cls, program: Program, costs: Costs, *, split_backward: bool) -> Problem:
        """Return the problem of all ops that are due.

        Args:
            program: any.
            costs: the program's costs.
            split_backward: whether to split backwards into separate I and W.

        Raises:
            CostsError: the costs do not fit the program.
        """
        due = list(due_ops(program))
        if split_backward:
            due = [half for op in due for half in split_backward_ops(op)]
        lanes = tuple(
            Lane(device, 0, tuple(op for op in due if op.stage in stages))
            for device, stages in enumerate(program.stages_on)
        )
        work = prepare(Schedule(program, lanes), costs)
        ops = tuple(op for lane in lanes for op in lane.ops)
        return cls(work, ops, *_tasks_and_waits(work))

    def sequences(self) -> Iterator[list[int]]:
        """Yield tasks of one kind, stage and step, in order of their microbatches."""
        groups: dict[tuple[int, Kind, int, int], list[int]] = {}
        for number, (task, row) in enumerate(zip(self.tasks, self.rows, strict=True)):
            op = self.ops[row]
            key = task.resource, op.kind, op.stage, op.step
            groups.setdefault(key, []).append(number)
        yield from groups.values()

    def microbatch_waits(self) -> Iterator[StartLag]:
        """Return lags that keep microbatches in order of number.

        Nothing is lost by it: equal microbatches can change their names. If the k-th
        forward of every stage is called k, it still comes after k forwards of the
        stage before, so after the k-th.
        """
        for numbers in self.sequences():
            for first, second in pairwise(numbers):
                one, other = self.tasks[first], self.tasks[second]
                lag_s = one.seconds + one.after_s + other.before_s
                yield StartLag(first, second, lag_s)


def split_backward_ops(op: Op) -> tuple[Op, ...]:
    """Return a whole backward as I and W; any other op as it is."""
    if op.kind is not Kind.BACKWARD:
        return (op,)
    return tuple(replace(op, kind=kind) for kind in SPLIT_BACKWARD)


def _tasks_and_waits(
    work: Work,
) -> tuple[tuple[TimedTask, ...], tuple[int, ...], tuple[StartLag, ...]]:
    needs, messages, columns = work.needs, work.messages, work.columns
    num_ops, num_devices = columns.num_ops, work.schedule.program.num_devices
    makers, handling_s = messages.maker.tolist(), messages.handling_s.tolist()
    occupied_s, latency_s = messages.occupied_s.tolist(), messages.latency_s.tolist()
    before_s, after_s = [0.0] * num_ops, [0.0] * num_ops
    sent: list[TimedTask] = []
    rows = [*range(num_ops)]
    waits: list[StartLag] = []

    # 1. What each op hands over, one message after another. Where the bytes take time,
    #    the message is a task; else it only makes its reader wait.
    arrives: list[tuple[int, float]] = []  # so long after the start of this task
    for message, maker in enumerate(makers):
        after_s[maker] += handling_s[message]
        ready_s = work.seconds[maker] + after_s[maker]
        if occupied_s[message]:
            task = num_ops + len(sent)
            link = 2 * num_devices + int(messages.link[message])
            sent.append(TimedTask(link, 0.0, occupied_s[message], 0.0))
            rows.append(maker)
            waits.append(StartLag(maker, task, ready_s))
            arrives.append((task, occupied_s[message] + latency_s[message]))
        else:
            arrives.append((maker, ready_s + latency_s[message]))

    # 2. What each op waits for, the last first: what arrives is taken in one after
    #    another, and what is taken in by one of several readers by none of them.
    num_readers = Counter(needs.arrival.tolist())
    needed = needs.row.tolist(), needs.maker.tolist(), needs.arrival.tolist()
    for row, maker, arrival in reversed(list(zip(*needed, strict=True))):
        if arrival == LOCAL:
            if maker >= 0:  # and not given from the start
                waits.append(StartLag(maker, row, work.seconds[maker]))
            continue
        if num_readers[arrival] == 1:
            before_s[row] += handling_s[arrival]
        task, lag_s = arrives[arrival]
        waits.append(StartLag(task, row, lag_s + before_s[row]))

    # 3. Reductions leave their lane free.
    done = (
        TimedTask(device + num_devices * reduces, *parts)
        for device, reduces, *parts in zip(
            columns.device.tolist(),
            work.is_collective,
            before_s,
            work.seconds,
            after_s,
            strict=True,
        )
    )
    return (*done, *sent), tuple(rows), tuple(waits)


# The longest paths through the waits, from the beginning and to the end.
@dataclass(frozen=True, slots=True)
class Paths:
    """The longest paths from the beginning to each task, and from it to the end.

    Args:
        head_s: no order starts the task earlier.
        tail_s: no order ends sooner than this after the task's start.
    """

    head_s: tuple[float, ...]
    tail_s: tuple[float, ...]

    @property
    def longest_s(self) -> float:
        """The longest path."""
        return max(self.tail_s, default=0.0)

    @classmethod
    def of(cls, seconds: Sequence[float], waits: Iterable[StartLag]) -> Paths:
        """Return the longest paths through every task.

        Args:
            seconds: the seconds of each task.
            waits: the lags between tasks; without a cycle.
        """
        waits = tuple(waits)
        order = tuple(in_order(range(len(seconds)), waits))
        place = {task: i for i, task in enumerate(order)}
        head_s, tail_s = [0.0] * len(seconds), [*seconds]
        for before, after, lag_s in sorted(waits, key=lambda w: place[w.before]):
            head_s[after] = max(head_s[after], head_s[before] + lag_s)
        for before, after, lag_s in sorted(waits, key=lambda w: -place[w.after]):
            tail_s[before] = max(tail_s[before], lag_s + tail_s[after])
        return cls(tuple(head_s), tuple(tail_s))


def in_order(keys: Sequence[Any], waits: Iterable[StartLag]) -> Iterator[int]:
    """Return the tasks, each after all that it waits for; else by the lowest key.

    Args:
        keys: a comparable key of each task.
        waits: the lags between tasks; without a cycle.
    """
    num_tasks = len(keys)
    followers: list[list[int]] = [[] for _ in keys]
    num_missing = [0] * num_tasks
    for before, after, _ in waits:
        followers[before].append(after)
        num_missing[after] += 1
    ready = [(keys[task], task) for task in range(num_tasks) if not num_missing[task]]
    heapify(ready)
    while ready:
        _, task = heappop(ready)
        yield task
        for after in followers[task]:
            num_missing[after] -= 1
            if not num_missing[after]:
                heappush(ready, (keys[after], after))


# A lower bound on the time of any order of a program's work.
#
# A lane that works without a pause still begins when its first op may, and after its
# last op others follow. So for any set of a lane's ops:
#
#     earliest start of any of them + all their seconds + least that follows any of them
#
#     d1   │ 0F │ 1F 1I 1W 1F 1I 1W 1F 1I 1W │ 0I 0W │
#            ▲           m times                ▲
#          head                                tail
#
# The highest over all lanes, and over the sets that a least head and a least tail pick
# out, is the bound; and so for reductions and links. Source: Carlier, "The one-machine
# sequencing problem", EJOR 11 (1982), section 2.
def bound_s(program: Program, costs: Costs, *, split_backward: bool = True) -> float:
    """Return the least time of any order of a program's work.

    Args:
        program: any.
        costs: the program's costs; jitter is ignored.
        split_backward: whether I and W may be separate ops; whole ones may be slower.

    Raises:
        CostsError: the costs do not fit the program.
    """
    # All microbatches are equal: one gives the heads and tails of the others.
    once = replace(
        program,
        nets=tuple(replace(net, num_microbatches=1) for net in program.nets),
        num_steps=1,
    )
    steady = replace(costs, jitter=0.0)
    problem = Problem.of(once, steady, split_backward=split_backward)
    paths = Paths.of(problem.seconds, problem.waits)
    works: defaultdict[int, list[_ResourceLoad]] = defaultdict(list)
    for number, task in enumerate(problem.tasks):
        op = problem.ops[problem.rows[number]]
        times = 1 if op.microbatch is None else program.num_microbatches_of(op.stage)
        head_s = paths.head_s[number] - task.before_s
        tail_s = paths.tail_s[number] - task.seconds - task.after_s
        total_s = task.taken_s * times * program.num_steps
        works[task.resource].append(_ResourceLoad(head_s, total_s, tail_s))
    alone_s = (_one_machine_s(of_one) for of_one in works.values())
    return max(paths.longest_s, *alone_s)


@dataclass(frozen=True, slots=True)
class _ResourceLoad:
    """A resource's work, with the least time before and after it."""

    head_s: float
    total_s: float
    tail_s: float


def _one_machine_s(works: Sequence[_ResourceLoad]) -> float:
    """Return the least time of one resource, with its head and tail."""
    late_first = sorted(works, key=lambda work: -work.head_s)
    most_s = 0.0
    for tail_s in {work.tail_s for work in works}:
        total_s = 0.0
        for work in late_first:
            if work.tail_s >= tail_s:
                total_s += work.total_s
                most_s = max(most_s, work.head_s + total_s + tail_s)
    return most_s
