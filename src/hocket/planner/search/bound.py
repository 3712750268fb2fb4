"""A lower bound on the time of any order of a program's work.

A lane that works without a pause still begins when its first op may, and after its last
op others follow. So for any set of a lane's ops:

    earliest start of any of them + all their seconds + least that follows any of them

    d1   │ 0F │ 1F 1I 1W 1F 1I 1W 1F 1I 1W │ 0I 0W │
           ▲           m times                ▲
         head                                tail

The highest over all lanes, and over the sets that a least head and a least tail pick
out, is the bound; and so for reductions and links. Source: Carlier, "The one-machine
sequencing problem", EJOR 11 (1982), section 2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hocket.core.costs import Costs
from hocket.core.program import Program
from hocket.planner.search.problem import Paths, Problem


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
