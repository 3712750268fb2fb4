"""Every order that lanes and values allow, one by one: an oracle for the checker.

A state is the set of ops that have ended. An asynchronous op may end whenever its lane
has come past it and all that it needs is there. Only schedules with few ops are small
enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations

from hocket.core.accesses import Access, Resource, accesses
from hocket.core.dataflow import is_given, makes, needs
from hocket.core.op import ASYNCHRONOUS, Kind, Op
from hocket.core.schedule import Schedule

State = frozenset[Op]


@dataclass
class EveryOrder:
    """All states that can be reached.

    Args:
        schedule: with few ops.
        states: each of them.
        ended: of each op, the ops that have ended in every state in which it may come.
    """

    schedule: Schedule
    states: set[State] = field(default_factory=set)
    ended: dict[Op, State] = field(default_factory=dict)

    def conflicts(self) -> set[tuple[Op, Op]]:
        """Pairs that use gradients or buffers, one changing them, in no fixed order."""
        users: dict[tuple[Resource, int, int], list[tuple[Op, Access]]] = {}
        for op in self._ops():
            for use in accesses(op, self.schedule.program):
                if use.resource is not Resource.WEIGHTS:
                    key = use.resource, use.stage, use.number
                    users.setdefault(key, []).append((op, use))
        return {
            (a, b)
            for ops in users.values()
            for (a, use_a), (b, use_b) in combinations(ops, 2)
            if (use_a.writes or use_b.writes)
            and a not in self.ended[b]
            and b not in self.ended[a]
        }

    def num_versions(self, stage: int) -> int:
        """The most versions of the weights alive in any state."""
        readers: dict[int, set[Op]] = {}
        updates: set[Op] = set()
        for op in self._ops():
            for use in accesses(op, self.schedule.program):
                if use.resource is Resource.WEIGHTS and use.stage == stage:
                    kept = (
                        updates if use.writes else readers.setdefault(use.number, set())
                    )
                    kept.add(op)
        most = 1
        for ended in self.states:
            newest = len(updates & ended)
            old = [v for v in range(newest) if readers.get(v, set()) - ended]
            most = max(most, 1 + len(old))
        return most

    def num_gradients(self, stage: int) -> int:
        """The most steps whose gradients are begun and not used, in any state."""
        ops = [op for op in self._ops() if op.stage == stage]
        adds = [op for op in ops if op.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)]
        updates = [op for op in ops if op.kind is Kind.UPDATE]
        return max(
            len(
                {op.step for op in adds if op in ended}
                - {op.step for op in updates if op in ended}
            )
            for ended in self.states
        )

    def _ops(self) -> Iterator[Op]:
        return (op for lane in self.schedule.lanes for op in lane.ops)


def every_order(schedule: Schedule, *, most_states: int) -> EveryOrder | None:
    """Visit every state; None where there are more than `most_states`."""
    found = EveryOrder(schedule)
    todo: list[State] = [frozenset()]
    while todo:
        state = todo.pop()
        if state in found.states:
            continue
        if len(found.states) == most_states:
            return None
        found.states.add(state)
        for op in _next(schedule, state):
            found.ended[op] = found.ended.get(op, state) & state
            todo.append(state | {op})
    return found


def _next(schedule: Schedule, ended: State) -> Iterator[Op]:
    program = schedule.program
    made = {value for op in ended for value in makes(op, program)}
    for lane in schedule.lanes:
        for op in lane.ops:
            if op in ended:
                continue
            if all(is_given(value) or value in made for value in needs(op, program)):
                yield op
            if op.kind not in ASYNCHRONOUS:
                break
