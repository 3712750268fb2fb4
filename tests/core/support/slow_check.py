"""What the checker proves, found in the plainest way: oracles for its fast ways.

Lanes are played op by op with `dataflow` alone, anew for each number of buffers; vector
clocks are kept whole, of every op.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from hocket.core.dataflow import Value, is_given, is_sent, maker, makes, needs
from hocket.core.op import ASYNCHRONOUS, MESSAGES, SENDS, Kind, Op
from hocket.core.schedule import Schedule

_Arrival = tuple[Value, int]  # a value, and the device that it comes to


def buffers_or_stuck(
    schedule: Schedule, num_buffers: int | None = None
) -> tuple[int, list[str]]:
    """The fewest buffers that suffice, or the given ones; and where lanes are stuck.

    Args:
        schedule: with all ops of its program.
        num_buffers: the only number to try.
    """
    for number in count(1) if num_buffers is None else (num_buffers,):
        player = _Player(schedule, number)
        player.play()
        stuck = list(player.stuck())
        if num_buffers is not None or not any("cannot send" in text for text in stuck):
            return number, stuck
    raise AssertionError


@dataclass
class _Player:
    """Goes round the lanes, and does whatever can be done."""

    schedule: Schedule
    num_buffers: int
    have: set[_Arrival] = field(default_factory=set)
    posted: set[tuple[Kind, Value, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        program, lanes = self.schedule.program, self.schedule.lanes
        self.is_explicit = any(op.kind in MESSAGES for lane in lanes for op in lane.ops)
        self.at = [0] * len(lanes)
        self.unsent: list[list[_Arrival]] = [[] for _ in lanes]
        self.reads_left: Counter[_Arrival] = Counter()
        self.flow: dict[_Arrival, object] = {}
        self.in_buffers: Counter[object] = Counter()
        for lane in lanes:
            for op in lane.ops:
                for value in needs(op, program):
                    if is_sent(value, lane.device, program):
                        self.reads_left[value, lane.device] += 1

    def play(self) -> None:
        moved = True
        while moved:
            moves = [self.step(number) for number in range(len(self.at))]
            moved = any(moves)

    def step(self, number: int) -> bool:
        """Do the next thing in a lane; whether there was one."""
        lane = self.schedule.lanes[number]
        if self.unsent[number]:
            return self.send(number, self.unsent[number])
        if self.at[number] == len(lane.ops) or self.missing(number):
            return False
        op = lane.ops[self.at[number]]
        self.at[number] += 1
        self.read(op, lane.device)
        for value in makes(op, self.schedule.program):
            self.have.add((value, lane.device))
            self.unsent[number] += [] if self.is_explicit else self.arrivals(value)
        if op.kind in MESSAGES:
            self.post(op)
        return True

    def missing(self, number: int) -> list[Value]:
        """What the next op of a lane waits for."""
        program, lane = self.schedule.program, self.schedule.lanes[number]
        return [
            value
            for value in needs(lane.ops[self.at[number]], program)
            if not is_given(value)
            and (value, self.holder(value, lane.device)) not in self.have
        ]

    def holder(self, value: Value, device: int) -> int:
        """Where a device finds a value: with itself, or with a collective's member."""
        program = self.schedule.program
        is_here = is_sent(value, device, program)
        return device if is_here else program.stages[value.stage].device

    def arrivals(self, value: Value) -> list[_Arrival]:
        devices = range(self.schedule.program.num_devices)
        return [(value, d) for d in devices if (value, d) in self.reads_left]

    def send(self, number: int, unsent: list[_Arrival]) -> bool:
        value, device = unsent[0]
        flow = value.fact, value.stage, device, number
        if self.in_buffers[flow] == self.num_buffers:
            return False
        self.in_buffers[flow] += 1
        self.flow[value, device] = flow
        self.have.add(unsent.pop(0))
        return True

    def read(self, op: Op, device: int) -> None:
        """Free the buffers of what is read for the last time."""
        for value in needs(op, self.schedule.program):
            arrival = value, device
            if arrival in self.flow:
                self.reads_left[arrival] -= 1
                self.in_buffers[self.flow[arrival]] -= not self.reads_left[arrival]

    def post(self, op: Op) -> None:
        """A message has come once both its ends are posted."""
        assert op.peer is not None
        is_send = op.kind in SENDS
        is_forward = op.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
        source, target = (op.stage, op.peer) if is_send else (op.peer, op.stage)
        kind = Kind.SEND_FORWARD if is_forward else Kind.SEND_BACKWARD
        send = Op(kind, source, op.microbatch, op.step, target)
        (value,) = needs(send, self.schedule.program)
        message = kind, value, target
        if message in self.posted:
            self.have.add((value, self.schedule.program.stages[target].device))
        self.posted.add(message)

    def stuck(self) -> Iterator[str]:
        """Where each lane stands that did not end, as errors say it."""
        program = self.schedule.program
        for number, lane in enumerate(self.schedule.lanes):
            if self.unsent[number]:
                value, device = self.unsent[number][0]
                yield (
                    f"  {lane.label} stands at {lane.ops[self.at[number] - 1]} and "
                    f"cannot send {value} to device {device}: all {self.num_buffers} "
                    "receive buffers there hold unread messages"
                )
            elif self.at[number] < len(lane.ops):
                value = self.missing(number)[0]
                yield (
                    f"  {lane.label} stands at {lane.ops[self.at[number]]} and needs "
                    f"{value} of {maker(value, program)}"
                )


class WholeClocks:
    """The last op of every lane that happens before each op.

    Args:
        schedule: complete, and free of deadlock.
        order: the places of all ops among those of all lanes, as they may start.
    """

    def __init__(self, schedule: Schedule, order: Sequence[int]) -> None:
        ops = [(n, op) for n, lane in enumerate(schedule.lanes) for op in lane.ops]
        program = schedule.program
        made_by = {
            value: row
            for row, (_, op) in enumerate(ops)
            for value in makes(op, program)
        }
        self._lane = [number for number, _ in ops]
        self._clock: list[dict[int, int]] = [{} for _ in ops]
        now: dict[int, dict[int, int]] = defaultdict(dict)
        for row in order:
            lane, op = ops[row]
            clock = dict(now[lane])
            for value in needs(op, program):
                made = made_by.get(value)
                if made is None:
                    continue
                if self._lane[made] != lane or ops[made][1].kind in ASYNCHRONOUS:
                    for other, last in {
                        **self._clock[made],
                        self._lane[made]: made,
                    }.items():
                        clock[other] = max(last, clock.get(other, -1))
            self._clock[row] = clock
            if op.kind not in ASYNCHRONOUS:
                now[lane] = clock

    def before(self, first: int, second: int) -> bool:
        """Whether the op in row `first` always ends before `second` starts."""
        lane = self._lane[first]
        if lane == self._lane[second]:
            return first < second
        return first <= self._clock[second].get(lane, -1)
