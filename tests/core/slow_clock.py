"""A second simulator, slow and obvious: the oracle for the fast ones.

It holds time as fractions, looks at every lane again after everything that happens, and
asks `dataflow` about each op by itself. Values are looked up by `(value, device)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from math import isinf

from hocket.core.costs import Costs, Link, StageCost
from hocket.core.dataflow import Fact, Value, is_given, makes, needs
from hocket.core.op import MESSAGES, READS_WEIGHTS, SENDS, Kind, Op
from hocket.core.schedule import Schedule

Seconds = Fraction
Place = tuple[int, int]  # lane, position
ZERO = Fraction(0)


@dataclass
class SlowMessage:
    """One message, on its way as soon as all its `posts` are made."""

    value: Value
    maker: Place
    to_device: int
    num_bytes: int
    posts_missing: int
    explicit: tuple[Place, ...] = ()
    ready: Seconds = ZERO
    start: Seconds | None = None
    end: Seconds | None = None


@dataclass
class SlowLane:
    """Where a lane stands; `left` is the work left of the op that it does now."""

    position: int = 0
    free: Seconds = ZERO
    left: Seconds | None = None


@dataclass
class SlowClock:
    """Plays a schedule; afterwards `start`, `end` and `messages` say what happened."""

    schedule: Schedule
    costs: Costs
    now: Seconds = ZERO
    start: dict[Place, Seconds] = field(default_factory=dict)
    end: dict[Place, Seconds] = field(default_factory=dict)
    have: dict[tuple[Value, int], Seconds] = field(default_factory=dict)
    messages: list[SlowMessage] = field(default_factory=list)
    link_free: dict[object, Seconds] = field(default_factory=dict)
    reduced: dict[int, Seconds] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Find the maker of each value, and who reads a message first."""
        program = self.schedule.program
        self.stages = self.costs.of(program)
        self.lanes = [SlowLane() for _ in self.schedule.lanes]
        self.is_explicit = any(
            op.kind in MESSAGES for lane in self.schedule.lanes for op in lane.ops
        )
        self.maker: dict[Value, Place] = {}
        self.readers: dict[tuple[Value, int], list[Place]] = {}
        for place, op, device in self.ops():
            for value in makes(op, program):
                self.maker[value] = place
            for value in needs(op, program):
                if program.stages[value.stage].device != device:
                    self.readers.setdefault((value, device), []).append(place)
        for place, op, device in self.ops():
            self.messages += self.messages_of(place, op, device)
        self.messages.sort(key=lambda m: (m.explicit or (m.maker,), m.to_device))

    def ops(self) -> Iterator[tuple[Place, Op, int]]:
        """Every op with its place and device, lane after lane."""
        for i, lane in enumerate(self.schedule.lanes):
            for j, op in enumerate(lane.ops):
                yield (i, j), op, lane.device

    def messages_of(self, place: Place, op: Op, device: int) -> Iterator[SlowMessage]:
        """The messages that an op sends."""
        program = self.schedule.program
        if op.kind in SENDS:
            assert op.peer is not None
            (value,) = needs(op, program)
            other = next(
                there
                for there, receive, _ in self.ops()
                if receive.kind in MESSAGES - SENDS
                and (receive.stage, receive.peer) == (op.peer, op.stage)
                and (receive.microbatch, receive.step) == (op.microbatch, op.step)
                and receive.kind.value[-1] == op.kind.value[-1]
            )
            target = program.stages[op.peer].device
            size = self.num_bytes(value)
            yield SlowMessage(value, self.maker[value], target, size, 2, (place, other))
        elif not self.is_explicit:
            for value in makes(op, program):
                for target in range(program.num_devices):
                    if (value, target) in self.readers:
                        yield SlowMessage(
                            value, place, target, self.num_bytes(value), 1
                        )

    def num_bytes(self, value: Value) -> int:
        """The size of a value that is sent."""
        cost = self.stages[value.stage]
        is_output = value.fact is Fact.OUTPUT
        return cost.output_bytes if is_output else cost.input_grad_bytes

    def run(self) -> None:
        """Play it all."""
        while True:
            while self.something_happens():
                pass
            later = [time for time in self.instants() if time > self.now]
            if not later:
                break
            self.advance(min(later))
        assert all(
            lane.position == len(facts.ops)
            for lane, facts in zip(self.lanes, self.schedule.lanes, strict=True)
        ), "the slow clock stands still"

    def something_happens(self) -> bool:
        """Do the first thing that can be done now: end an op, begin one, send."""
        for i, lane in enumerate(self.lanes):
            if lane.left == 0:
                self.end_op(i)
                return True
        for i in range(len(self.lanes)):
            begin = self.begin_time(i)
            if begin is not None and begin <= self.now:
                self.begin_op(i, begin)
                return True
        ready = [m for m in self.messages if m.start is None and not m.posts_missing]
        for message in sorted(ready, key=lambda m: m.ready):
            if message.ready <= self.now:
                self.send(message)
                return True
        return False

    def instants(self) -> Iterator[Seconds]:
        """When something could happen next."""
        for i, lane in enumerate(self.lanes):
            if lane.left is not None:
                yield self.now + lane.left / self.pace(i)
            begin = self.begin_time(i)
            if begin is not None:
                yield begin
        for message in self.messages:
            if message.start is None and not message.posts_missing:
                yield message.ready

    def advance(self, to: Seconds) -> None:
        """Let time pass, and busy lanes work."""
        paces = [self.pace(i) for i in range(len(self.lanes))]
        for lane, pace in zip(self.lanes, paces, strict=True):
            if lane.left is not None:
                lane.left -= (to - self.now) * pace
        self.now = to

    def pace(self, lane: int) -> Fraction:
        """How fast a lane works now."""
        device = self.schedule.lanes[lane].device
        num_busy = sum(
            self.lanes[i].left is not None for i in self.schedule.lanes_of(device)
        )
        return min(Fraction(1), Fraction(self.costs.lane_capacity) / max(1, num_busy))

    def begin_time(self, i: int) -> Seconds | None:
        """When a lane's next op can begin, if that is known."""
        lane, facts = self.lanes[i], self.schedule.lanes[i]
        if lane.left is not None or lane.position == len(facts.ops):
            return None
        time = lane.free
        for value in needs(facts.ops[lane.position], self.schedule.program):
            if is_given(value):
                continue
            wish = value, facts.device
            if wish not in self.have:
                return None
            time = max(time, self.have[wish])
            if self.readers.get(wish, [None])[0] == (i, lane.position):
                time += self.handling(self.num_bytes(value))
        return max(time, self.whole_time(i))

    def whole_time(self, i: int) -> Seconds:
        """When the weights that a lane's next op reads are whole, if it reads any."""
        ops, position = self.schedule.lanes[i].ops, self.lanes[i].position
        if ops[position].kind not in READS_WEIGHTS:
            return ZERO
        gathers = [
            j
            for j, op in enumerate(ops[:position])
            if op.kind is Kind.UNSHARD and op.stage == ops[position].stage
        ]
        return self.end[i, gathers[-1]] if gathers else ZERO

    def begin_op(self, i: int, time: Seconds) -> None:
        """Begin a lane's next op; the lane goes on at once if it only starts it."""
        lane, facts = self.lanes[i], self.schedule.lanes[i]
        op = facts.ops[lane.position]
        place = i, lane.position
        self.start[place] = time
        cost = self.stages[op.stage]
        if op.kind in (Kind.REDUCE, Kind.UNSHARD):
            begin = max(time, self.reduced.get(facts.device, ZERO))
            is_gather = op.kind is Kind.UNSHARD
            taken = Fraction(cost.unshard_s) if is_gather else self.reduced_s(cost)
            self.end[place] = begin + taken
            self.reduced[facts.device] = self.end[place]
            self.make(op, facts.device, self.end[place])
            lane.free = time
            lane.position += 1
        elif op.kind in MESSAGES:
            lane.free = self.post(place, op, time)
            lane.position += 1
        else:
            lane.left = Fraction(cost.seconds(op.kind)) + Fraction(self.costs.op_s)

    def reduced_s(self, cost: StageCost) -> Seconds:
        """A reduce-scatter over shards, and an all-reduce of a part over replicas."""
        program, link = self.schedule.program, self.costs.reduce_link
        latency = Fraction(link.latency_s)
        shards, replicas = program.num_shards, program.num_replicas
        scatter = latency + seconds(link, cost.gradient_bytes) / shards
        part = seconds(link, cost.gradient_bytes // shards) / replicas
        return (shards - 1) * scatter + 2 * (replicas - 1) * (latency + part)

    def end_op(self, i: int) -> None:
        """The op that a lane does has ended."""
        lane, facts = self.lanes[i], self.schedule.lanes[i]
        op = facts.ops[lane.position]
        place = i, lane.position
        self.end[place] = self.now
        self.make(op, facts.device, self.now)
        lane.free = self.post(place, op, self.now)
        lane.left = None
        lane.position += 1

    def make(self, op: Op, device: int, time: Seconds) -> None:
        """What an op makes is on its device."""
        for value in makes(op, self.schedule.program):
            self.have[value, device] = time

    def post(self, place: Place, op: Op, time: Seconds) -> Seconds:
        """Post an op's messages; returns when its lane is free."""
        for message in self.messages:
            if place not in (message.explicit or (message.maker,)):
                continue
            if op.kind in SENDS or not message.explicit:
                time += self.handling(message.num_bytes)
            message.ready = max(message.ready, time)
            message.posts_missing -= 1
        return time

    def send(self, message: SlowMessage) -> None:
        """Put a message on its link."""
        source = self.schedule.lanes[message.maker[0]].device
        link = self.costs.link_between(source, message.to_device)
        key = link.name or (source, message.to_device)
        message.start = max(message.ready, self.link_free.get(key, ZERO))
        self.link_free[key] = message.start + seconds(link, message.num_bytes)
        message.end = self.link_free[key] + Fraction(link.latency_s)
        self.have.setdefault((message.value, message.to_device), message.end)
        for place in message.explicit:
            self.end[place] = message.end

    def handling(self, num_bytes: int) -> Seconds:
        """What a lane spends on a message."""
        link = self.costs.handling
        return Fraction(link.latency_s) + seconds(link, num_bytes)


def seconds(link: Link, num_bytes: int) -> Seconds:
    """How long bytes occupy a link."""
    return ZERO if isinf(link.bytes_per_s) else num_bytes / Fraction(link.bytes_per_s)
