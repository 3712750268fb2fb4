"""Place ops of other nets in the lanes of one step, as devices go through the steps.

    step k   S S . . . B B . . U │ S S ...      a lane of the student: where it waits,
             S S t t . B B t . U │              the next forward that can start
             └───────┬───────┘ └─ what is left goes before the updates
                     └─ t is of a batch ahead of k

The lanes go through several steps, each as soon as it can, so that their waits are
those of a pipeline that is running. The order of any of these steps may be repeated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, NamedTuple, assert_never

from hocket.core.costs import Costs
from hocket.core.gates import Gates
from hocket.core.op import Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Lane
from hocket.passes.value_times import ValueTimes

_NUM_STEPS: Final = 4  # steps simulated; in the last one the waits change no more


@dataclass(frozen=True, slots=True)
class StepLane:
    """The ops of one lane in one step.

    Args:
        lane: the student's ops of step 0; their order does not change.
        added: the ops to place, one queue per stage; a queue's order does not change.
            An op's step is how many batches it is ahead.
        updates: those of the added nets, behind all other ops.
    """

    lane: Lane
    added: tuple[tuple[Op, ...], ...]
    updates: tuple[Op, ...]

    @property
    def most_ahead(self) -> int:
        """The most batches that any op is ahead."""
        return max((op.step for queue in self.added for op in queue), default=0)


class Precedence(Enum):
    """Which op goes first where a lane could start both."""

    FILL_WAITS = "the student's op"
    IN_PACE = "the student's op, unless the added nets have done a smaller share"
    FIRST = "the added op; the student's ops wait for all added ops"
    LAST = "the student's op; added ops go between its backwards and its updates"


def placed(
    lanes: Sequence[StepLane],
    program: Program,
    costs: Costs,
    precedence: Precedence,
    gates: Gates,
) -> tuple[tuple[Lane, ...], ...]:
    """Return the orders of the steps that the lanes go through, each for all lanes.

    Args:
        lanes: what is to be ordered.
        program: the program of all ops.
        costs: the costs of the program.
        precedence: which op goes first.
        gates: the stages whose updates wait for each other's gradients.
    """
    times = ValueTimes(program, costs, gates)
    num_ahead = max(lane.most_ahead for lane in lanes)
    walks = [_Walk(lane, -num_ahead, times, precedence) for lane in lanes]
    while starts := [
        (choice.start_s, number)
        for number, walk in enumerate(walks)
        if (choice := walk.next()) is not None
    ]:
        walks[min(starts)[1]].do_next()
    return tuple(
        tuple(
            replace(walk.given.lane, ops=tuple(walk.done[num_ahead + step]))
            for walk in walks
        )
        for step in range(_NUM_STEPS)
    )


class _Choice(NamedTuple):
    """What a lane could do next: the first op of a queue, and when it could start."""

    start_s: float
    op: Op
    queue: deque[Op]


class _Walk:
    """One lane that plays all steps, one op at a time.

    It begins before step 0, where it plays only the added nets' forwards.
    """

    def __init__(
        self,
        given: StepLane,
        first_step: int,
        times: ValueTimes,
        precedence: Precedence,
    ) -> None:
        """Begin with nothing done."""
        self.given = given
        self.times = times
        self.precedence = precedence
        self.free_s = 0.0
        self.done: list[list[Op]] = []
        self.choice: _Choice | None = None
        self.is_known = False
        self._begin(first_step)
        self._leave_empty_steps()

    def next(self) -> _Choice | None:
        """Return what the lane does next; None if nothing can start, or is left."""
        if not self.is_known:
            self._choose()
        return self.choice

    def do_next(self) -> None:
        """Play the chosen op; begin the next step if this one has no op left."""
        assert self.choice is not None
        start_s, op, queue = self.choice
        self.free_s = self.times.do(self._at(op), start_s)
        queue.popleft()
        self.done[-1].append(op)
        if op.kind is Kind.FORWARD:
            self.num_left[queue is self.fixed] -= 1
        self.choice, self.is_known = None, False
        self._leave_empty_steps()

    def _leave_empty_steps(self) -> None:
        while not self.fixed and not self._heads() and self.step + 1 < _NUM_STEPS:
            self._begin(self.step + 1)

    def _begin(self, step: int) -> None:
        ops = (*self.given.lane.ops, *self.given.updates) if step >= 0 else ()
        self.step = step
        self.fixed = deque(ops)
        self.added = [
            deque(op for op in queue if op.step + step >= 0)
            for queue in self.given.added
        ]
        self.num_updates = _num_last_updates(ops)
        added = [op for queue in self.added for op in queue]
        self.num_forwards = [_num_forwards(added), _num_forwards(ops)]
        self.num_left = list(self.num_forwards)
        self.done.append([])

    def _heads(self) -> list[deque[Op]]:
        return [queue for queue in self.added if queue]

    def _choose(self) -> None:
        """Choose among the first ops of all queues those that can start first."""
        queues = list(self._open())
        starts = [start for queue in queues if (start := self._start(queue))]
        self.is_known = bool(queues) and len(starts) == len(queues)
        self.choice = min(starts, key=self._rank, default=None)

    def _open(self) -> Iterator[deque[Op]]:
        """Yield the queues whose first op may go next."""
        heads = self._heads()
        at_updates = len(self.fixed) <= self.num_updates
        waits = at_updates or self.precedence is Precedence.FIRST
        if self.fixed and not (heads and waits):
            yield self.fixed
        if at_updates or self.precedence is not Precedence.LAST:
            yield from heads

    def _start(self, queue: deque[Op]) -> _Choice | None:
        ready_s = self.times.ready_s(self._at(queue[0]), self.given.lane.device)
        if ready_s is None:
            return None
        return _Choice(max(self.free_s, ready_s), queue[0], queue)

    def _rank(self, choice: _Choice) -> tuple[float, bool, int, int, int]:
        """Order choices by start and precedence, then by age of batch and block.

        A block is of as many microbatches as there are devices, as in interleaved
        orders.
        """
        op, is_fixed = choice.op, choice.queue is self.fixed
        start_s = float(f"{choice.start_s:.9g}")  # sums differ in their last digits
        block = (op.microbatch or 0) // self.times.program.num_devices
        return start_s, is_fixed is self._is_added_first(), op.step, block, op.stage

    def _is_added_first(self) -> bool:
        """Return whether an added forward goes before an op that keeps its order."""
        match self.precedence:
            case Precedence.FILL_WAITS | Precedence.LAST:
                return False
            case Precedence.FIRST:
                return True
            case Precedence.IN_PACE:
                added, fixed = self.num_forwards
                added_left, fixed_left = self.num_left
                return (added - added_left) * fixed < (fixed - fixed_left + 1) * added
            case _:
                assert_never(self.precedence)

    def _at(self, op: Op) -> Op:
        """Return an op of the step that the lane is in."""
        return Op(op.kind, op.stage, op.microbatch, op.step + self.step)


def _num_forwards(ops: Iterable[Op]) -> int:
    return sum(op.kind is Kind.FORWARD for op in ops)


def _num_last_updates(ops: Sequence[Op]) -> int:
    """Return how many updates stand behind all other ops."""
    others = (i for i, op in enumerate(reversed(ops)) if op.kind is not Kind.UPDATE)
    return next(others, len(ops))
