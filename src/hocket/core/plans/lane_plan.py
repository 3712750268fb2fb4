"""Plan what a lane does around each op: waits, messages and events.

The runtime plays these plans and derives nothing itself. They follow from `dataflow`
and from where ops stand:

    d0    0F0                   records y0 for d0.1 │ sends y0 to d1
    d0.1       0W0              waits for dx0 of d0
    d1         1F0              receives y0 from d0

A value crosses from one device to another once, however many ops read it there.

A flush-free order is cut into portions, which are played as batches come.

The number of batches is not known beforehand. So the runtime plays the order in
portions of all lanes, and repeats the middle one as long as there are batches:

              prologue              │ body           │ body           │ epilogue
    d0        F0 F0@1 F0@2 B0 U     │ F0@3 B0@1 U@1  │ F0@4 B0@2 U@2  │ B0@3 U@3 ...
    begins    0, 1, 2               │ 3              │ 4              │
    ends      0                     │ 1              │ 2              │ 3, 4

A portion's prologue is the schedule's, with its body once, since the first body begins
with batches that the prologue has read.

The lanes of one device end a portion together, and a device expects the messages that
others send in the portion that it begins. So no lane may need within a portion what
another lane makes in the next one. Where it would, other lanes' bodies begin later:

    d0    |: 0F0 :|  0F0@1 ...                 0F0  |: 0F0@1 :|
    d1    1F0 |: 1F0@1 :|       becomes        1F0  |: 1F0@1 :|
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hocket.core.checker.gathers import gather_faults
from hocket.core.dataflow import Value, is_given, is_sent, lane_needs, makes, needs
from hocket.core.gates import Gates, stage_gates, with_gate
from hocket.core.op import ASYNCHRONOUS, MESSAGES, Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.errors import PlanError, ScheduleError

Flow = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Message:
    """One value on its way from one device to another.

    Args:
        value: an output, the gradient of an input, or gathered outputs.
        from_device: the device that makes it.
        from_lane: the index of the lane, among all of the schedule, that sends it.
            `check` proves its buffers for each sending lane by itself.
        to_device: the device that reads it.
        flows: every `(from_stage, to_stage)` that it serves, ascending: one, unless
            several stages of the receiving device read the value. A gradient goes from
            the higher stage to the lower one.
    """

    value: Value
    from_device: int
    from_lane: int
    to_device: int
    flows: tuple[Flow, ...]


@dataclass(frozen=True, slots=True)
class OpPlan:
    """One op, and what its lane does before and after it.

    Args:
        op: the op.
        waits: values whose event the lane waits for: other lanes of the device make
            them, for this op or for its gate, or an op that only starts in the lane and
            ends later (R, G, UNSHARD). A value is listed at the first op of the lane
            that needs it. What a collective brings from other devices is not: it has
            come when the device's own R ends.
        receives: messages that must have arrived, each at the first op of the lane
            that needs its value.
        records: values that `op` makes and whose event other ops wait for.
        sends: messages that leave when `op` has ended, in order of device.
        follows: ops of other devices that `op` waits for without a message: an update
            needs the gradients of its gate and of its stage's copies.
    """

    op: Op
    waits: tuple[Value, ...]
    receives: tuple[Message, ...]
    records: tuple[Value, ...]
    sends: tuple[Message, ...]
    follows: tuple[Op, ...] = ()

    @property
    def needed(self) -> tuple[Value, ...]:
        """The values that must be on the device before the op, for the first time."""
        return (*self.waits, *(message.value for message in self.receives))

    @property
    def made(self) -> tuple[Value, ...]:
        """The values that other ops or devices have of it."""
        sent = (message.value for message in self.sends)
        return tuple(dict.fromkeys((*self.records, *sent)))


def plan_lanes(schedule: Schedule, gates: Gates = ()) -> tuple[tuple[OpPlan, ...], ...]:
    r"""Return the plan of each lane, in the order of the schedule's lanes.

    Args:
        schedule: one that `check` accepts, without explicit messages.
        gates: the stages whose gradients are judged together. An update waits for the
            gradients of its gate that other lanes of the device make.

    Raises:
        PlanError: the schedule holds explicit messages.

    >>> schedule = Schedule.parse("d0  0F0 0B0 0U\nd1  1F0 1I0 1U\nd1.1  1W0")
    >>> for plan in plan_lanes(schedule)[1]:
    ...     print(plan.op, *map(str, plan.waits), *(str(v) for v in plan.records))
    1F0
    1I0 dx[stage 1, microbatch 0]
    1U dw[stage 1, microbatch 0]
    """
    explicit = [op for lane in schedule.lanes for op in lane.ops if op.kind in MESSAGES]
    if explicit:
        raise PlanError(
            f"the schedule holds {len(explicit)} messages as ops, the first is "
            f"{explicit[0]}: remove them by drop_messages of hocket.passes.add_messages"
            ", since a plan derives messages from the other ops"
        )
    facts = _Facts(schedule, gates)
    return tuple(
        tuple(_lane(schedule, number, facts)) for number in range(len(schedule.lanes))
    )


class _Place(NamedTuple):
    """Where an op stands."""

    lane: int
    device: int
    position: int


class _Facts:
    """Where each value is made and needed."""

    def __init__(self, schedule: Schedule, gates: Gates) -> None:
        program = schedule.program
        self.gate_of = stage_gates(gates)
        self.made: dict[Value, _Place] = {}
        self.asynchronous: set[Value] = set()
        # Of each value and device, the flows by which its stages need it.
        self.flows: dict[tuple[Value, int], set[Flow]] = defaultdict(set)
        self.needing_lanes: dict[Value, set[int]] = defaultdict(set)
        for number, lane in enumerate(schedule.lanes):
            for position, (op, needed) in enumerate(lane_needs(lane.ops, program)):
                place = _Place(number, lane.device, position)
                for value in makes(op, program):
                    self.made[value] = place
                    if op.kind in ASYNCHRONOUS:
                        self.asynchronous.add(value)
                self._read(op, needed, place, program)

    def _read(
        self, op: Op, needed: tuple[Value, ...], place: _Place, program: Program
    ) -> None:
        for value in self.gate_needs(op, program):
            self.needing_lanes[value].add(place.lane)
        for value in needed:
            self.needing_lanes[value].add(place.lane)
            self.flows[value, place.device].add((value.stage, op.stage))

    def gate_needs(self, op: Op, program: Program) -> tuple[Value, ...]:
        """Return what the other stages of an update's gate need on its device."""
        device = program.stages[op.stage].device
        _, *others = with_gate(op, self.gate_of)
        return tuple(
            value
            for other in others
            if program.stages[other.stage].device == device
            for value in needs(other, program)
        )

    def follows(self, op: Op, schedule: Schedule) -> tuple[Op, ...]:
        """Return the ops of other devices that an update waits for."""
        if op.kind is not Kind.UPDATE:
            return ()
        program = schedule.program
        device = program.stages[op.stage].device
        last: dict[int, int] = {}  # of each lane
        for one in with_gate(op, self.gate_of):
            for value in needs(one, program):
                place = self.made.get(value)
                if place is not None and place.device != device:
                    last[place.lane] = max(place.position, last.get(place.lane, 0))
        return tuple(schedule.lanes[lane].ops[i] for lane, i in last.items())

    def message(self, value: Value, to_device: int) -> Message:
        """Return the message that brings a value to another device."""
        made = self.made[value]
        flows = tuple(sorted(self.flows[value, to_device]))
        return Message(value, made.device, made.lane, to_device, flows)


def _lane(schedule: Schedule, number: int, facts: _Facts) -> Iterator[OpPlan]:
    program, lane = schedule.program, schedule.lanes[number]
    seen: set[Value] = set()
    waited: set[Value] = set()
    for op, values in lane_needs(lane.ops, program):
        needed = [v for v in values if not is_given(v) and v not in seen]
        seen.update(needed)
        made = makes(op, program)
        waits = [
            v
            for v in dict.fromkeys((*needed, *facts.gate_needs(op, program)))
            if not is_given(v)
            and v not in waited
            and _is_waited_for(v, number, lane.device, facts)
        ]
        waited.update(waits)
        yield OpPlan(
            op,
            tuple(waits),
            tuple(
                facts.message(v, lane.device)
                for v in needed
                if is_sent(v, lane.device, program)
            ),
            tuple(v for v in made if _is_recorded(v, lane.device, schedule, facts)),
            tuple(
                facts.message(v, device)
                for v in made
                for device in range(program.num_devices)
                if (v, device) in facts.flows and is_sent(v, device, program)
            ),
            facts.follows(op, schedule),
        )


def _is_waited_for(value: Value, lane: int, device: int, facts: _Facts) -> bool:
    """Return whether another lane of the device, or an asynchronous op, makes it."""
    place = facts.made[value]
    elsewhere = place.lane != lane or value in facts.asynchronous
    return place.device == device and elsewhere


def _is_recorded(value: Value, device: int, schedule: Schedule, facts: _Facts) -> bool:
    """Return whether a lane of the same device waits for it."""
    return any(
        schedule.lanes[lane].device == device
        and _is_waited_for(value, lane, device, facts)
        for lane in facts.needing_lanes[value]
    )


Ops = tuple[Op, ...]
Plans = tuple[tuple[OpPlan, ...], ...]  # of each lane


@dataclass(frozen=True, slots=True)
class Portions:
    """What each lane plays, portion by portion.

    Args:
        prologue: each lane's prologue and its body once; steps count from 0.
        body: each lane's body once more, as it follows the prologue. In the next
            repetition all steps are one later.
        epilogue: each lane's epilogue, as it follows the prologue. Behind a repetition
            of the body all its steps are one later.
        num_steps: the steps of prologue and epilogue: the fewest batches it takes.
        num_ended: the steps that all lanes have ended when the prologue ends.
    """

    prologue: tuple[Ops, ...]
    body: tuple[Ops, ...]
    epilogue: tuple[Ops, ...]
    num_steps: int
    num_ended: int


def portions(schedule: Schedule) -> Portions:
    """Cut an order that has a body.

    Args:
        schedule: one that `align_bodies` returns.

    Raises:
        PlanError: it has none.
    """
    if not schedule.body:
        raise PlanError(
            "an order without a repeating body has no portions: each of its steps ends "
            "before the next begins"
        )
    num_steps = schedule.program.num_steps - schedule.num_repeats + 1
    twice = schedule.with_num_steps(num_steps + 1)
    prologue, body, epilogue = [], [], []
    for lane, (begin, end) in zip(twice.lanes, twice.body, strict=True):
        middle = begin + (end - begin) // 2
        prologue.append(lane.ops[:middle])
        body.append(lane.ops[middle:end])
        epilogue.append(tuple(op.later(-1) for op in lane.ops[end:]))
    left = [op.step for ops in (*body, *epilogue) for op in ops]
    return Portions(
        tuple(prologue),
        tuple(body),
        tuple(epilogue),
        num_steps,
        num_ended=min(left, default=num_steps),
    )


def plan_portions(
    schedule: Schedule, gates: Gates = ()
) -> tuple[Portions, Plans, Plans, Plans]:
    """Cut an order that has a body, and plan the ops of each lane.

    Args:
        schedule: one that `check` accepts, without explicit messages.
        gates: the stages whose gradients are judged together.

    Raises:
        ScheduleError: a sharded stage would be whole between two portions.

    Returns:
        The portions, and the plans of prologue, body and epilogue. The epilogue follows
        a second repetition of the body there: all its steps are one later.
    """
    aligned = align_bodies(schedule, gates)
    faults = () if aligned is schedule else tuple(x for x, _ in gather_faults(aligned))
    if faults:  # the body begins elsewhere
        raise ScheduleError(faults, str(aligned))
    cut = portions(aligned)
    plans = plan_lanes(aligned.with_num_steps(cut.num_steps + 1), gates)
    lanes = [
        (plan, len(first), len(first) + len(body))
        for plan, first, body in zip(plans, cut.prologue, cut.body, strict=True)
    ]
    return (
        cut,
        tuple(plan[:begin] for plan, begin, _ in lanes),
        tuple(plan[begin:end] for plan, begin, end in lanes),
        tuple(plan[end:] for plan, _, end in lanes),
    )


def align_bodies(schedule: Schedule, gates: Gates = ()) -> Schedule:
    """Let bodies begin later where a lane needs what another makes in a later portion.

    Args:
        schedule: one that `check` accepts. Returned as it is if it has no body, or if
            no lane needs such.
        gates: the stages whose gradients are judged together: an update waits for the
            gradients of its gate, too.

    Returns:
        The same order, for more steps if bodies begin later.
    """
    if not schedule.body:
        return schedule
    num_repeats = 4
    while True:
        num_steps = schedule.program.num_steps - schedule.num_repeats + num_repeats
        wide = schedule.with_num_steps(num_steps)
        lengths = [(end - begin) // num_repeats for begin, end in wide.body]
        first = [begin + n for (begin, _), n in zip(wide.body, lengths, strict=True)]
        played = _played_before(wide, first, gates)
        later = [max(0, n - count) for n, count in zip(played, first, strict=True)]
        if not any(later):
            return schedule
        bodies = max(-(-n // max(1, m)) for n, m in zip(later, lengths, strict=True))
        if bodies < num_repeats - 1:
            break
        num_repeats *= 2
    left = num_repeats - bodies
    body = tuple(
        (begin + more, begin + more + left * length)
        for (begin, _), more, length in zip(wide.body, later, lengths, strict=True)
    )
    return Schedule(wide.program, wide.lanes, body, left)


def _played_before(
    schedule: Schedule, counts: Sequence[int], gates: Gates
) -> list[int]:
    """Count the ops of each lane that must be played for the first ops of all lanes.

    Args:
        schedule: the order.
        counts: the number of first ops of each lane.
        gates: the stages whose gradients each update waits for.
    """
    program = schedule.program
    gate_of = stage_gates(gates)
    made: dict[Value, tuple[int, int]] = {
        value: (number, position)
        for number, lane in enumerate(schedule.lanes)
        for position, op in enumerate(lane.ops)
        for value in makes(op, program)
    }
    played = [0] * len(schedule.lanes)
    due = [(number, count - 1) for number, count in enumerate(counts)]
    while due:
        number, position = due.pop()
        begin = played[number]
        played[number] = max(begin, position + 1)
        for op in schedule.lanes[number].ops[begin : position + 1]:
            for one in with_gate(op, gate_of):
                due += [made[value] for value in needs(one, program) if value in made]
    return played
