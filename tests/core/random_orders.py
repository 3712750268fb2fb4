"""Random programs, random orders of them that can run, and random costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import strategies as st

from hocket.core.costs import Costs, Link, StageCost
from hocket.core.dataflow import Fact, Value, due_ops, is_given, makes, needs
from hocket.core.op import Kind, Op
from hocket.core.program import Net, Program, Stage
from hocket.core.schedule import Lane, Schedule


@st.composite
def programs(draw: st.DrawFn, *, max_devices: int = 3) -> Program:
    """One net of a few stages, or a teacher and its student."""
    num_stages = draw(st.integers(1, 4))
    num_teachers = draw(st.integers(0, 2))
    total = num_stages + num_teachers
    num_devices = draw(st.integers(1, min(max_devices, total)))
    extra = st.lists(
        st.integers(0, num_devices - 1),
        min_size=total - num_devices,
        max_size=total - num_devices,
    )
    devices = draw(st.permutations([*range(num_devices), *draw(extra)]))
    students = [
        Stage("student", device, delay=draw(st.integers(0, 2)))
        for device in devices[num_teachers:]
    ]
    teachers = [
        _teacher(draw, device, devices[num_teachers:], num_teachers)
        for device in devices[:num_teachers]
    ]
    num_microbatches = draw(st.integers(1, 3))
    batch_loss = draw(st.booleans())
    nets = [Net("student", num_microbatches, batch_loss)]
    if teachers:
        num = draw(st.integers(1, 3))
        num = num if batch_loss else num * num_microbatches
        nets.insert(0, Net("teacher", num))
    flows = {(s, s + 1) for s in range(total - 1)} - {(num_teachers - 1, num_teachers)}
    if num_stages > 2 and draw(st.booleans()):
        flows.add((num_teachers, total - 1))  # one that skips the stages between
    if teachers:
        flows.add((num_teachers - 1, total - 1))
    return Program(
        tuple(nets),
        (*teachers, *students),
        tuple(sorted(flows)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
    )


def _teacher(
    draw: st.DrawFn, device: int, students: list[int], first_student: int
) -> Stage:
    """A teacher's stage, which may follow a student's on its device."""
    followed = [first_student + i for i, d in enumerate(students) if d == device]
    if not followed or not draw(st.booleans()):
        return Stage("teacher", device, trainable=False)
    delay = draw(st.integers(0, 2))
    return Stage("teacher", device, False, delay, tuple(followed))


@dataclass
class _Writer:
    """Writes down ops in an order in which they could be done one after another."""

    program: Program
    draw: st.DrawFn
    lanes: dict[tuple[int, int], list[Op]]
    have: set[tuple[Value, int]] = field(default_factory=set)
    unposted: list[Op] = field(default_factory=list)
    half_posted: set[tuple[Value, int]] = field(default_factory=set)

    def write(self, ops: list[Op], *, explicit: bool) -> None:
        """Write all ops, and with `explicit` their messages."""
        self.targets = dict(self.wishes(ops))
        self.explicit = explicit
        while ops or self.unposted:
            ready = [op for op in ops if self.is_ready(op)] + self.unposted
            op = ready[self.draw(st.integers(0, len(ready) - 1))]
            device = self.program.stages[op.stage].device
            streams = [key for key in self.lanes if key[0] == device]
            self.lanes[self.draw(st.sampled_from(streams))].append(op)
            if op in self.unposted:
                self.unposted.remove(op)
                self.post(op)
            else:
                ops.remove(op)
                self.make(op, device)

    def wishes(self, ops: list[Op]) -> Iterator[tuple[tuple[Value, int], int]]:
        """Values wanted on another device, and the lowest stage there that does."""
        for op in sorted(ops, key=lambda op: -op.stage):
            device = self.program.stages[op.stage].device
            for value in needs(op, self.program):
                if self.program.stages[value.stage].device != device:
                    yield (value, device), op.stage

    def is_ready(self, op: Op) -> bool:
        """Whether all that an op needs is on its device."""
        device = self.program.stages[op.stage].device
        return all(
            is_given(value) or (value, device) in self.have
            for value in needs(op, self.program)
        )

    def make(self, op: Op, device: int) -> None:
        """What an op makes exists; others get it at once, or by messages."""
        for value in makes(op, self.program):
            self.have.add((value, device))
            for (wanted, target), stage in self.targets.items():
                if wanted != value:
                    continue
                if not self.explicit:
                    self.have.add((value, target))
                    continue
                forward = value.fact is Fact.OUTPUT
                send = Kind.SEND_FORWARD if forward else Kind.SEND_BACKWARD
                receive = Kind.RECEIVE_FORWARD if forward else Kind.RECEIVE_BACKWARD
                ends = op.microbatch, op.step
                self.unposted += [
                    Op(send, op.stage, *ends, stage),
                    Op(receive, stage, *ends, op.stage),
                ]

    def post(self, op: Op) -> None:
        """A value has come when both ends of its message are posted."""
        assert op.peer is not None
        sends = op.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
        forward = op.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
        source, target = (op.stage, op.peer) if sends else (op.peer, op.stage)
        fact = Fact.OUTPUT if forward else Fact.INPUT_GRAD
        value = Value(fact, source, op.microbatch, op.step)
        message = value, self.program.stages[target].device
        if message in self.half_posted:
            self.have.add(message)
        self.half_posted.add(message)


def _parts(draw: st.DrawFn, op: Op) -> list[Op]:
    """Return a whole backward, or its I and W."""
    if op.kind is not Kind.BACKWARD or draw(st.booleans()):
        return [op]
    halves = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
    return [Op(kind, op.stage, op.microbatch, op.step) for kind in halves]


@st.composite
def orders(
    draw: st.DrawFn, *, max_streams: int = 2, explicit: bool | None = None
) -> Schedule:
    """A random program and a random order of it in which no lane waits for ever."""
    program = draw(programs())
    ops = [part for op in due_ops(program) for part in _parts(draw, op)]
    lanes: dict[tuple[int, int], list[Op]] = {
        (device, stream): []
        for device in range(program.num_devices)
        for stream in range(draw(st.integers(1, max_streams)))
    }
    if explicit is None:
        explicit = draw(st.booleans())
    _Writer(program, draw, lanes).write(ops, explicit=explicit)
    return Schedule(
        program,
        tuple(
            Lane(device, stream, tuple(ops)) for (device, stream), ops in lanes.items()
        ),
    )


def _stage_cost(draw: st.DrawFn) -> StageCost:
    seconds, size = st.integers(0, 3).map(float), st.sampled_from([0, 1, 2, 4])
    return StageCost(
        forward_s=draw(seconds),
        input_grad_s=draw(seconds),
        weight_grad_s=draw(seconds),
        loss_s=draw(seconds),
        update_s=draw(seconds),
        output_bytes=draw(size),
        input_grad_bytes=draw(size),
        activation_bytes=draw(size),
        weight_grad_held_bytes=draw(size),
        weight_bytes=draw(size),
        gradient_bytes=draw(size),
        optimizer_bytes=draw(size),
        forward_work_bytes=draw(size),
        backward_work_bytes=draw(size),
        input_grad_work_bytes=draw(size),
        weight_grad_work_bytes=draw(size),
        update_work_bytes=draw(size),
        replay_bytes=draw(size),
        recomputes=draw(st.booleans()),
        holds_input=draw(st.booleans()),
    )


@st.composite
def costs_for(draw: st.DrawFn, program: Program, *, shared: bool = True) -> Costs:
    """Costs in numbers that floats hold exactly, also halved and added up."""
    small = st.integers(0, 3)
    stages = tuple(_stage_cost(draw) for _ in program.stages)
    names = st.sampled_from(["", "a", "b"] if shared else [""])

    def link() -> Link:
        bandwidth = draw(st.sampled_from([0.5, 1.0, 4.0, float("inf")]))
        return Link(float(draw(small)), bandwidth, draw(names))

    devices = range(program.num_devices)
    links = tuple(
        (a, b, link()) for a in devices for b in devices if draw(st.booleans())
    )
    return Costs(
        stages,
        link=link(),
        links=links,
        reduce_link=Link(float(draw(small)), draw(st.sampled_from([1.0, 2.0]))),
        handling=draw(st.sampled_from([Link(), Link(0.25), Link(0.0, 2.0)])),
        op_s=draw(st.sampled_from([0.0, 0.125])),
        lane_capacity=draw(st.sampled_from([1.0, 2.0])),
    )
