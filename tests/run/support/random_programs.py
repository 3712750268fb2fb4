"""Random programs, and random orders of them that `check` accepts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from hocket.core.check import check
from hocket.core.dataflow import due_ops, makes, needs
from hocket.core.op import Kind, Op
from hocket.core.program import Net, Program, Stage
from hocket.core.schedule import Lane, Schedule
from hocket.errors import HocketError
from tests.strategies import taken_when_ready

NUM_TRIES = 60


def random_schedule(random: Random, num_workers: int) -> Schedule:
    """Return an order of a program for so many workers, accepted by `check`.

    One in two programs has delays, and an order with a body.
    """
    for _ in range(NUM_TRIES):
        replicas = random.choice([1, 2]) if num_workers > 1 else 1
        program = random_program(random, num_workers // replicas, replicas)
        order = (
            overlapping_order(random, program)
            if random.random() < 0.5
            else one_step_order(random, program)
        )
        if order is not None:
            return order
    raise AssertionError(f"no order found in {NUM_TRIES} tries")


@dataclass(frozen=True)
class _Nets:
    """What was drawn of each net.

    Args:
        sizes: the number of stages.
        kinds: "trained", "frozen" or "follows".
        relations: of each net but the last, where its output goes in the next one.
    """

    sizes: list[int]
    kinds: list[str]
    relations: list[str]

    @property
    def starts(self) -> list[int]:
        """The first stage of each net."""
        return [sum(self.sizes[:i]) for i in range(len(self.sizes))]


def random_program(random: Random, num_devices: int, num_replicas: int) -> Program:
    """Return one to three nets, on devices without gaps."""
    while True:
        nets = _drawn_nets(random, num_devices)
        stages = _drawn_stages(random, nets, num_devices)
        if len({stage.device for stage in stages}) < num_devices:
            continue
        try:
            counts = tuple(_drawn_counts(random, nets))
            return Program(
                counts,
                tuple(stages),
                tuple(sorted(_drawn_flows(random, nets))),
                num_replicas=num_replicas,
                whole_batch_flows=frozenset(_drawn_whole(random, nets, counts)),
            )
        except HocketError:
            continue


def _drawn_nets(random: Random, num_devices: int) -> _Nets:
    num_nets = random.randint(1, 3)
    sizes = [random.randint(1, 3) for _ in range(num_nets)]
    while sum(sizes) < num_devices:
        sizes[random.randrange(num_nets)] += 1
    relations = [random.choice(["none", "input", "loss"]) for _ in sizes[1:]]
    kinds = [random.choice(["trained", "frozen", "follows"]) for _ in sizes]
    kinds[-1] = "trained"
    for i, relation in enumerate(relations):
        if relation == "loss" and relations[i + 1 : i + 2] not in ([], ["none"]):
            relations[i] = relation = "none"  # a loss is where gradients begin
        if relation == "loss" or (relation == "input" and kinds[i] == "trained"):
            kinds[i + 1] = "trained"
    return _Nets(sizes, kinds, relations)


def _drawn_stages(random: Random, nets: _Nets, num_devices: int) -> list[Stage]:
    devices = [*range(num_devices)]
    devices += random.choices(devices, k=sum(nets.sizes) - num_devices)
    random.shuffle(devices)
    stages: list[Stage] = []
    for i, (size, kind) in enumerate(zip(nets.sizes, nets.kinds, strict=True)):
        others = zip(nets.starts, nets.sizes, nets.kinds, strict=True)
        leaders = [a for a, n, x in others if x == "trained" and n == size]
        for place in range(size):
            number = nets.starts[i] + place
            if kind == "follows" and leaders:
                leader = leaders[0] + place
                stages.append(Stage(f"n{i}", devices[leader], False, 0, (leader,)))
            else:
                stages.append(Stage(f"n{i}", devices[number], kind == "trained"))
    return stages


def _drawn_flows(random: Random, nets: _Nets) -> Iterator[tuple[int, int]]:
    for start, size in zip(nets.starts, nets.sizes, strict=True):
        yield from ((start + k, start + k + 1) for k in range(size - 1))
        if size == 3 and random.random() < 0.5:
            yield start, start + 2
    for i, relation in enumerate(nets.relations):
        end, target = nets.starts[i] + nets.sizes[i] - 1, nets.starts[i + 1]
        if relation == "input":
            yield end, target
        elif relation == "loss":
            yield end, target + nets.sizes[i + 1] - 1


def _drawn_counts(random: Random, nets: _Nets) -> Iterator[Net]:
    """Return the nets; one behind a teacher may have finer or coarser microbatches."""
    count = random.randint(1, 3)
    for i, kind in enumerate(nets.kinds):
        is_end = nets.relations[i : i + 1] in ([], ["none"])
        whole = kind == "trained" and is_end and random.random() < 0.4
        after_teacher = i > 0 and nets.kinds[i - 1] != "trained"
        if after_teacher and nets.relations[i - 1] != "none":
            if whole and nets.relations[i - 1] == "loss":
                count = random.randint(1, 3)
            elif random.random() < 0.5:
                finer = [count * 2, count * 3]
                count = random.choice([1, *finer] if count < 3 else [1])
        yield Net(f"n{i}", count, whole, whole and random.random() < 0.5)


def _drawn_whole(
    random: Random, nets: _Nets, counts: tuple[Net, ...]
) -> Iterator[tuple[int, int]]:
    """Return flows of which each microbatch reads the whole batch."""
    for i, relation in enumerate(nets.relations):
        may = relation == "loss" and nets.kinds[i] != "trained"
        if may and not counts[i + 1].batch_loss and random.random() < 0.4:
            end = nets.starts[i] + nets.sizes[i] - 1
            yield end, nets.starts[i + 1] + nets.sizes[i + 1] - 1


def one_step_order(random: Random, program: Program) -> Schedule | None:
    """Return any order of one step, or None where `check` refuses it."""
    due = [half for op in due_ops(program) for half in _maybe_split(random, op)]
    random.shuffle(due)
    ops = [*taken_when_ready(due, program)]
    updates = [op for op in ops if op.kind is Kind.UPDATE]
    ops = [op for op in ops if op.kind is not Kind.UPDATE] + updates
    order = Schedule(program, tuple(_lanes(random, program, ops)))
    return order if _is_accepted(order) else None


def overlapping_order(random: Random, program: Program) -> Schedule | None:
    """Return an order in which steps overlap, or None where `check` refuses it.

    One step's ops are divided into one to three parts. The body plays the first part
    of one step, the second part of the step before, and so on.
    """
    due = [half for op in due_ops(program) for half in _maybe_split(random, op)]
    random.shuffle(due)
    ops = [*taken_when_ready(due, program)]
    num_shifts = random.randint(1, 2)
    marks = sorted(random.randint(0, len(ops)) for _ in range(num_shifts))
    shifts = {op: sum(i >= mark for mark in marks) for i, op in enumerate(ops)}
    stages = list(program.stages)
    for number, stage in enumerate(stages):
        if stage.moves:
            parts = [shifts[op] for op in ops if op.stage == number]
            least = max(0, max(parts) - min(parts) - 1)
            delay = random.randint(least, 2)
            stages[number] = replace(stage, delay=delay)
    last = max(shifts.values())
    num_steps = last + 1
    program = replace(program, stages=tuple(stages), num_steps=num_steps)
    lane_of = {op: random.randint(0, 1) for op in ops}
    two = [random.random() < 0.5 for _ in range(program.num_devices)]
    body = _body(random, program, ops, shifts)
    if body is None:
        return None
    lanes: dict[tuple[int, int], list[list[Op]]] = {}
    for op in body:
        device = program.stages[op.stage].device
        lanes.setdefault((device, lane_of[op] if two[device] else 0), [])
    found, ranges = [], []
    num_lanes: dict[int, int] = {}
    for device, stream in sorted(lanes):
        own = [
            op
            for op in body
            if program.stages[op.stage].device == device
            and (lane_of[op] if two[device] else 0) == stream
        ]
        rounds = [
            [
                replace(op, step=i - shifts[op])
                for op in own
                if 0 <= i - shifts[op] < num_steps
            ]
            for i in range(num_steps + last)
        ]
        begin = sum(len(x) for x in rounds[:last])
        ranges.append((begin, begin + len(rounds[last])))
        number = num_lanes.get(device, 0)
        num_lanes[device] = number + 1
        found.append(Lane(device, number, tuple(op for x in rounds for op in x)))
    try:
        order = Schedule(program, tuple(found), tuple(ranges), 1)
    except HocketError:
        return None
    return order if _is_accepted(order) else None


def _body(
    random: Random, program: Program, ops: list[Op], shifts: dict[Op, int]
) -> list[Op] | None:
    """Return one round of ops, each behind those of the round whose values it needs."""
    base = 10
    rounds = {op: replace(op, step=base - shifts[op]) for op in ops}
    wide = replace(program, num_steps=base + 2)
    made = {value for op in rounds.values() for value in makes(op, wide)}
    left = random.sample(ops, len(ops))
    done: list[Op] = []
    while left:
        op = next((op for op in left if made.isdisjoint(needs(rounds[op], wide))), None)
        if op is None:
            return None
        made.difference_update(makes(rounds[op], wide))
        left.remove(op)
        done.append(op)
    return done


def _lanes(random: Random, program: Program, ops: list[Op]) -> Iterator[Lane]:
    for device in range(program.num_devices):
        own = [op for op in ops if program.stages[op.stage].device == device]
        dealt: list[list[Op]] = [[] for _ in range(random.randint(1, 2))]
        for op in own:
            dealt[random.randrange(len(dealt))].append(op)
        dealt = [lane for lane in dealt if lane]
        yield from (Lane(device, i, tuple(lane)) for i, lane in enumerate(dealt))


def _maybe_split(random: Random, op: Op) -> tuple[Op, ...]:
    if op.kind is Kind.BACKWARD and random.random() < 0.5:
        halves = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        return tuple(replace(op, kind=kind) for kind in halves)
    return (op,)


def _is_accepted(order: Schedule) -> bool:
    try:
        check(order)
    except HocketError:
        return False
    return True
