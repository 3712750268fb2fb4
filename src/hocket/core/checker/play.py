"""Play a schedule without a clock, under the strictest rule for messages.

A send is a rendezvous: the lane that made a value goes on only when the receiver has a
buffer for it. A buffer is taken when its message is sent and given back when the op
that needs the value starts. An order that comes to its end under this rule comes to its
end under every milder one (sends that do not wait, messages that are buffered on the
way).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from hocket.core.dataflow import Fact, Value, is_given, maker, makes, needs
from hocket.core.op import MESSAGES, SENDS, Kind, Op
from hocket.core.schedule import Schedule

# A message: one value on its way to one device.
_Message = tuple[Value, int]


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a lane stands for ever, and why."""

    lane: int
    label: str
    position: int  # of the op in the lane that cannot start, or cannot end
    op: Op
    reason: str
    is_sending: bool

    def __str__(self) -> str:
        """One line of an error."""
        return f"  {self.label} stands at {self.op} and {self.reason}"


def play(schedule: Schedule, num_buffers: int) -> list[Stand]:
    """Run every lane as far as it goes.

    Args:
        schedule: complete (see `check`), in any order.
        num_buffers: receive buffers per flow: messages that may wait at the receiver.

    Returns:
        Where lanes stand for ever; empty if all came to their end.
    """
    state = _State(schedule, num_buffers)
    lanes = range(len(schedule.lanes))
    while sum(state.advance(lane) for lane in lanes):
        pass  # each round moves every lane as far as it goes
    return [state.stand(i) for i in lanes if not state.is_done(i)]


@dataclass
class _State:
    schedule: Schedule
    num_buffers: int
    position: list[int] = field(init=False)
    unsent: list[list[_Message]] = field(init=False)
    have: list[set[Value]] = field(init=False)
    waiting: dict[tuple[Fact, int, int], int] = field(init=False)
    readers: dict[_Message, int] = field(init=False)

    def __post_init__(self) -> None:
        program = self.schedule.program
        self.position = [0] * len(self.schedule.lanes)
        self.unsent = [[] for _ in self.schedule.lanes]
        self.have = [set() for _ in range(program.num_devices)]
        self.waiting = defaultdict(int)
        self.readers = defaultdict(int)  # ops yet to read a message
        self.posted: set[tuple[Value, int, bool]] = set()
        self.explicit = any(
            op.kind in MESSAGES for lane in self.schedule.lanes for op in lane.ops
        )
        self.targets: dict[Value, set[int]] = defaultdict(set)
        for lane in self.schedule.lanes:
            for op in lane.ops:
                for value in self._from_elsewhere(op, lane.device):
                    self.readers[value, lane.device] += 1
                    self.targets[value].add(lane.device)

    def is_done(self, lane: int) -> bool:
        """Whether the lane came to its end."""
        ops = self.schedule.lanes[lane].ops
        return self.position[lane] == len(ops) and not self.unsent[lane]

    def advance(self, lane: int) -> bool:
        """Run one lane as far as it goes now; whether it moved."""
        moved = False
        while self._send(lane) and self._start(lane):
            moved = True
        return moved

    def stand(self, lane: int) -> Stand:
        """Why a lane cannot go on."""
        facts = self.schedule.lanes[lane]
        if self.unsent[lane]:
            value, device = self.unsent[lane][0]
            position = self.position[lane] - 1
            reason = (
                f"cannot send {value} to device {device}: all {self.num_buffers} "
                "receive buffers there hold messages that nobody has read"
            )
            op = facts.ops[position]
            return Stand(lane, facts.label, position, op, reason, is_sending=True)
        position = self.position[lane]
        op = facts.ops[position]
        missing = next(self._missing(op, facts.device))
        program = self.schedule.program
        reason = f"needs {missing} of {maker(missing, program)}"
        return Stand(lane, facts.label, position, op, reason, is_sending=False)

    def _from_elsewhere(self, op: Op, device: int) -> Iterator[Value]:
        program = self.schedule.program
        if op.kind in MESSAGES:
            return
        for value in needs(op, program):
            if program.stages[value.stage].device != device:
                yield value

    def _missing(self, op: Op, device: int) -> Iterator[Value]:
        have = self.have[device]
        for value in needs(op, self.schedule.program):
            if value not in have and not is_given(value):
                yield value

    def _start(self, lane: int) -> bool:
        """Start and end the lane's next op, if it has all it needs."""
        facts = self.schedule.lanes[lane]
        if self.position[lane] == len(facts.ops):
            return False
        op = facts.ops[self.position[lane]]
        if next(self._missing(op, facts.device), None) is not None:
            return False
        self.position[lane] += 1
        if op.kind in MESSAGES:
            self._post(op, facts.device)
            return True
        for value in self._from_elsewhere(op, facts.device):
            self._read(value, facts.device)
        for value in makes(op, self.schedule.program):
            self.have[facts.device].add(value)
            if not self.explicit:
                targets = sorted(self.targets[value] - {facts.device})
                self.unsent[lane] += [(value, device) for device in targets]
        return True

    def _read(self, value: Value, device: int) -> None:
        message = (value, device)
        self.readers[message] -= 1
        if self.readers[message] == 0 and not self.explicit:
            self.waiting[value.fact, value.stage, device] -= 1

    def _send(self, lane: int) -> bool:
        """Send what the last op made; whether all of it is gone."""
        while self.unsent[lane]:
            value, device = self.unsent[lane][0]
            flow = (value.fact, value.stage, device)
            if self.waiting[flow] >= self.num_buffers:
                return False
            self.waiting[flow] += 1
            self.have[device].add(value)
            self.unsent[lane].pop(0)
        return True

    def _post(self, op: Op, device: int) -> None:
        """One end of an explicit message; it arrives when both ends are posted."""
        assert op.peer is not None
        forward = op.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
        sends = op.kind in SENDS
        source = op.stage if sends else op.peer
        stages = self.schedule.program.stages
        target = stages[op.peer].device if sends else device
        fact = Fact.OUTPUT if forward else Fact.INPUT_GRAD
        value = Value(fact, source, op.microbatch, op.step)
        self.posted.add((value, target, sends))
        if (value, target, not sends) in self.posted:
            self.have[target].add(value)
