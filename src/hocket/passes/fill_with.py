"""Fill the waits of a trained net's order with the forwards of another net."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from enum import Enum
from math import inf
from typing import Final, NamedTuple, assert_never

from hocket.core.check import check
from hocket.core.costs import Costs
from hocket.core.gates import Gates, early_updates, gates_of
from hocket.core.op import Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Lane, Schedule
from hocket.core.simulate import long_step_s
from hocket.core.step_end import repeat_ahead
from hocket.errors import PlanError
from hocket.nearest import nearest
from hocket.passes.add_gathers import add_gathers, drop_gathers
from hocket.passes.segments import refuse_messages
from hocket.passes.value_times import ValueTimes


def fill_with(
    schedule: Schedule,
    program: Program,
    net: str | Sequence[str] = "teacher",
    *,
    costs: Costs,
    look_ahead: Mapping[str, int] | None = None,
    own_lane: bool = False,
) -> Schedule:
    r"""Put a teacher's forwards where the devices of a student's order would wait.

    The student's order stays as it is on every device. A device that would wait does
    the teacher's next forward; those that are left go before the updates. Which batch
    they are of follows from the weights that they read, so that one version of these
    is enough, unless `look_ahead` says it:

        frozen                step `k` does the teacher's forwards of batch `k + 1`
        delay `d`, from 1 on  of batch `k + d`, with the weights after `k` updates
        delay 0               of batch `k` itself, behind the update of step `k - 1`

    Forwards ahead cost no time at all, if they are short and as long together as the
    student's bubble, or longer: with equal stages and forwards of the teacher that are
    no longer than the student's, a step of GPipe takes `m (f_t + f_s + b)`, and
    `max(0, (p - 1) (f_s + b) - m f_t)` more. Longer ones leave gaps: give the teacher
    more microbatches. Several orders are simulated; the one with the shortest step is
    returned.

    Args:
        schedule: the student's order of one step, which `check` accepts. It is of a
            program of its own: the stages that the net leaves of `program`, in the same
            sequence.
        program: all nets, with as many steps as the order is to have.
        net: the name of the net without backwards, or the names of several.
        costs: the costs of `program`.
        look_ahead: by how many batches a net's forwards are ahead, by its name; a net
            that moves with delay `d` can be `d` batches ahead, and needs one version of
            its weights more for each that it is less.
        own_lane: put these forwards in a second lane of each device, beside the order
            of the student, and not between its ops. They wait for nothing but weights,
            and the student's losses for them. A net of delay `d` has up to `d` versions
            of its weights more, as its updates need not wait for its forwards.

    Returns:
        The order of all nets. Where batches are ahead, it has a repeating body. Of
        sharded stages, gathers are placed by `add_gathers`, once per step.

    Raises:
        PlanError: the schedule is not of one step, holds messages, or is of another
            program than what the net leaves; or a net is unknown, has backwards, or
            cannot be as far ahead.
        ScheduleError: `check` does not accept the schedule.

    >>> from hocket.core.program import Net, Stage
    >>> student = Schedule.parse("d0  0F0 0F1 0B0 0B1 0U\nd1  1F0 1F1 1B0 1B1 1U")
    >>> program = Program(
    ...     nets=(Net("teacher", 2), Net("student", 2)),
    ...     stages=(
    ...         *(Stage("teacher", device, trainable=False) for device in range(2)),
    ...         *(Stage("student", device) for device in range(2)),
    ...     ),
    ...     flows=((0, 1), (2, 3), (1, 3)),
    ...     num_steps=2,
    ... )
    >>> filled = fill_with(student, program, costs=Costs.uniform())
    >>> print("\n".join(str(filled).splitlines()[-2:]))
    d0  0F0 0F1 |: 2F0 2F1 0F0@1 0F1@1 2B0 2B1 2U :| 2F0@1 2F1@1 2B0@1 2B1@1 2U@1
    d1  1F0 1F1 |: 3F0 3F1 3B0 3B1 1F0@1 1F1@1 3U :| 3F0@1 3F1@1 3B0@1 3B1@1 3U@1

    Source: Lim et al., TSPipe (ICML 2022), whose schedule is GPipe filled so; here the
    order may be any, and the times are given.
    """
    nets = (net,) if isinstance(net, str) else tuple(net)
    _refuse(schedule, program, nets)
    ahead = {name: _num_ahead(name, program) for name in nets} | dict(look_ahead or {})
    _refuse_ahead(ahead, program, nets)
    check(schedule)
    devices = {lane.device for lane in schedule.lanes}
    others = sorted(set(range(program.num_devices)).difference(devices))
    schedule = drop_gathers(schedule)
    lanes = (*schedule.lanes, *(Lane(device, 0, ()) for device in others))
    step_lanes = tuple(_step_lanes(lanes, program, ahead))
    if own_lane:
        return add_gathers(repeat_ahead(program, [*_beside(step_lanes, program)]))
    gates = _gates(schedule, program, nets)
    orders = dict.fromkeys(
        order
        for precedence in _precedences(ahead)
        for order in placed(step_lanes, program, costs, precedence, gates)
    )
    few = replace(program, num_steps=1 + max(ahead.values()))
    best = min(orders, key=lambda lanes: long_step_s(repeat_ahead(few, lanes), costs))
    return add_gathers(repeat_ahead(program, best))


def _num_ahead(net: str, program: Program) -> int:
    """Return how many batches a net runs ahead, so that it needs one version."""
    moving = [stage for stage in program.stages if stage.net == net and stage.moves]
    return min((stage.delay for stage in moving), default=1)


def _refuse_ahead(
    ahead: Mapping[str, int], program: Program, nets: tuple[str, ...]
) -> None:
    """Refuse to look farther ahead than there are weights.

    Raises:
        PlanError: a number is negative, or above a net's delay; or the net is unknown.
    """
    for net, num in ahead.items():
        if net not in nets:
            raise PlanError(f"look_ahead names net {net!r}; {nearest(net, nets)}")
        if num < 0:
            raise PlanError(f"look_ahead of net {net!r} is {num}: it may be 0 or more")
        moves = any(stage.net == net and stage.moves for stage in program.stages)
        if moves and num > _num_ahead(net, program):
            raise PlanError(
                f"look_ahead of net {net!r} is {num}, and its delay is "
                f"{_num_ahead(net, program)}: forwards so far ahead would read weights "
                f"that are not there yet; use at most the delay, or delay={num}"
            )


def _gates(schedule: Schedule, program: Program, nets: tuple[str, ...]) -> Gates:
    """Return the stages whose updates wait for each other's gradients."""
    own = gates_of(schedule, clips=False)
    trained = program.trained_stages
    if any(program.stages[n].delay for n in trained) or early_updates(schedule, own):
        return ()
    kept = [n for n, stage in enumerate(program.stages) if stage.net not in nets]
    return tuple(tuple(kept[n] for n in gate) for gate in own)


def _precedences(ahead: Mapping[str, int]) -> tuple[Precedence, ...]:
    """Return those to try; the last one bounds a step by the nets' own steps."""
    if all(ahead.values()):
        return (Precedence.FILL_WAITS, Precedence.LAST)
    return (Precedence.FILL_WAITS, Precedence.IN_PACE, Precedence.FIRST)


def _step_lanes(
    lanes: Sequence[Lane], program: Program, ahead: Mapping[str, int]
) -> Iterator[StepLane]:
    """Yield the ops of each lane in one step; a device's first lane gets the added."""
    kept = [n for n, stage in enumerate(program.stages) if stage.net not in ahead]
    seen: set[int] = set()
    for lane in lanes:
        ops = tuple(Op(op.kind, kept[op.stage], op.microbatch) for op in lane.ops)
        own = program.stages_on[lane.device] if lane.device not in seen else ()
        added = [number for number in own if program.stages[number].net in ahead]
        moving = [number for number in added if program.stages[number].moves]
        seen.add(lane.device)
        yield StepLane(
            Lane(lane.device, lane.stream, ops),
            tuple(tuple(_added(number, program, ahead)) for number in added),
            tuple(Op(Kind.UPDATE, number) for number in moving),
        )


def _beside(lanes: Sequence[StepLane], program: Program) -> Iterator[Lane]:
    """Yield the lanes of the student, with all updates, and those of the added ops.

    All updates stay in the student's lane: one of a teacher in another lane would read
    weights that the student's next update overwrites.
    """
    num_streams = 1 + max(lane.lane.stream for lane in lanes)
    for lane in lanes:
        yield replace(lane.lane, ops=(*lane.lane.ops, *lane.updates))
        added = [op for queue in lane.added for op in queue]
        added.sort(key=lambda op: (op.step, _part_of(op, program), op.stage))
        if added:
            yield Lane(lane.lane.device, num_streams, tuple(added))


def _part_of(op: Op, program: Program) -> float:
    """Return the part of the batch that is done with a forward; G follows all."""
    if op.microbatch is None:
        return inf
    return (op.microbatch + 1) / program.num_microbatches_of(op.stage)


def _added(number: int, program: Program, ahead: Mapping[str, int]) -> Iterator[Op]:
    """Yield the forwards of a stage, and what gathers their outputs over replicas."""
    num_ahead = ahead[program.stages[number].net]
    for microbatch in range(program.num_microbatches_of(number)):
        yield Op(Kind.FORWARD, number, microbatch, num_ahead)
    if number in program.gathered_stages:
        yield Op(Kind.GATHER, number, None, num_ahead)


def _refuse(schedule: Schedule, program: Program, nets: tuple[str, ...]) -> None:
    """Refuse what `fill_with` cannot fill.

    Raises:
        PlanError: as `fill_with`.
    """
    names = [net.name for net in program.nets]
    for net in nets:
        if net not in names:
            raise PlanError(f"no net is named {net!r}; {nearest(net, names)}")
        own = [n for n, stage in enumerate(program.stages) if stage.net == net]
        delays = {program.stages[n].delay for n in own if program.stages[n].moves}
        if len(delays) > 1:
            raise PlanError(
                f"the stages of net {net!r} have delays {sorted(delays)}: use one, "
                "which says how many batches the net is ahead"
            )
        trained = [n for n in own if program.stages[n].trainable]
        if trained:
            raise PlanError(
                f"net {net!r} has backwards: its stages {trained} are trainable. Only "
                "forwards can fill another net's waits"
            )
    refuse_messages(schedule)
    if schedule.program.num_steps != 1 or schedule.body:
        raise PlanError(
            f"the schedule is of {schedule.program.num_steps} steps: give the order of "
            "a single step, and num_steps in the program of all nets"
        )
    given, wanted = _facts(schedule.program, ()), _facts(program, nets)
    wrong = [name for name in wanted if given[name] != wanted[name]]
    if wrong:
        raise PlanError(
            "the schedule is of another program than all nets without "
            f"{', '.join(nets)}:\n  "
            + "\n  ".join(
                f"{name}: {given[name]} in the schedule, {wanted[name]} in the program"
                for name in wrong
            )
        )


def _facts(program: Program, nets: tuple[str, ...]) -> dict[str, object]:
    """Return what must agree, with stages numbered as without the nets."""
    kept = [n for n, stage in enumerate(program.stages) if stage.net not in nets]
    place = {number: i for i, number in enumerate(kept)}
    stages = [program.stages[number] for number in kept]
    inner = [(a, b) for a, b in program.flows if a in place and b in place]
    return {
        "devices of stages": [stage.device for stage in stages],
        "trainable stages": [stage.trainable for stage in stages],
        "delays of stages": [stage.delay for stage in stages],
        "microbatches of stages": [program.num_microbatches_of(n) for n in kept],
        "whole-batch losses": [place[n] for n in kept if n in program.loss_stages],
        "flows": sorted((place[a], place[b]) for a, b in inner),
        "replicas": program.num_pipelines,
        "copies": [tuple(place[n] for n in group) for group in program.copies],
    }


# Place ops of other nets in the lanes of one step, as devices go through the steps.
#
#     step k   S S . . . B B . . U │ S S ...      a lane of the student: where it waits,
#              S S t t . B B t . U │              the next forward that can start
#              └───────┬───────┘ └─ what is left goes before the updates
#                      └─ t is of a batch ahead of k
#
# The lanes go through several steps, each as soon as it can, so that their waits are
# those of a pipeline that is running. The order of any of these steps may be repeated.

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


@dataclass(eq=False)
class _Walk:
    """One lane that plays all steps, one op at a time.

    It begins before step 0, where it plays only the added nets' forwards.
    """

    given: StepLane
    first_step: InitVar[int]
    times: ValueTimes
    precedence: Precedence

    def __post_init__(self, first_step: int) -> None:
        """Begin with nothing done."""
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
        return op.later(self.step)


def _num_forwards(ops: Iterable[Op]) -> int:
    return sum(op.kind is Kind.FORWARD for op in ops)


def _num_last_updates(ops: Sequence[Op]) -> int:
    """Return how many updates stand behind all other ops."""
    others = (i for i, op in enumerate(reversed(ops)) if op.kind is not Kind.UPDATE)
    return next(others, len(ops))
