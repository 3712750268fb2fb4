"""Random programs, and random orders of them that `check` accepts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
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


def random_program(random: Random, num_devices: int, num_replicas: int) -> Program:
    """Return one to three nets, on devices without gaps."""
    num_nets = random.randint(1, 3)
    sizes = [random.randint(1, 3) for _ in range(num_nets)]
    while sum(sizes) < num_devices:
        sizes[random.randrange(num_nets)] += 1
    devices = [*range(num_devices)]
    devices += random.choices(devices, k=sum(sizes) - num_devices)
    random.shuffle(devices)
    relations = [random.choice(["none", "input", "loss"]) for _ in sizes[1:]]
    kinds = [random.choice(["trained", "frozen", "follows"]) for _ in sizes]
    kinds[-1] = "trained"
    for i, relation in enumerate(relations):
        if relation == "input" and kinds[i] == "trained":
            kinds[i + 1] = "trained"
        if relation == "loss":
            kinds[i + 1] = "trained"
    for i, relation in enumerate(relations[:-1]):  # a loss is at the end of gradients
        if relation == "loss" and relations[i + 1] != "none":
            relations[i] = "none"
    stages: list[Stage] = []
    flows: list[tuple[int, int]] = []
    starts = [sum(sizes[:i]) for i in range(num_nets)]
    for i, size in enumerate(sizes):
        leader = next(
            (
                j
                for j in range(num_nets)
                if kinds[i] == "follows" and kinds[j] == "trained" and sizes[j] == size
            ),
            None,
        )
        for place in range(size):
            device = devices[starts[i] + place]
            if leader is not None:
                stage = Stage(f"n{i}", device, False, 0, (starts[leader] + place,))
            else:
                stage = Stage(f"n{i}", device, kinds[i] == "trained")
            stages.append(stage)
        flows += [(starts[i] + k, starts[i] + k + 1) for k in range(size - 1)]
        if size == 3 and random.random() < 0.5:
            flows.append((starts[i], starts[i] + 2))
    for number, stage in enumerate(stages):  # followers live with their leaders
        if stage.follows:
            stages[number] = replace(stage, device=stages[stage.follows[0]].device)
    used = {device: i for i, device in enumerate(sorted({x.device for x in stages}))}
    if len(used) < num_devices:
        return random_program(random, num_devices, num_replicas)
    count = random.randint(1, 3)
    nets = []
    for i in range(num_nets):
        whole = kinds[i] == "trained" and random.random() < 0.4
        ends = i == num_nets - 1 or relations[i] == "none" or kinds[i + 1] != "trained"
        over = whole and random.random() < 0.5
        nets.append(Net(f"n{i}", count, whole and ends, over and whole and ends))
        if (
            i
            and relations[i - 1] == "loss"
            and nets[i].batch_loss
            and (kinds[i - 1] != "trained")
        ):
            nets[i] = replace(nets[i], num_microbatches=random.randint(1, 3))
            count = nets[i].num_microbatches
    for i, relation in enumerate(relations):
        end = starts[i] + sizes[i] - 1
        if relation == "input":
            flows.append((end, starts[i + 1]))
        elif relation == "loss":
            flows.append((end, starts[i + 1] + sizes[i + 1] - 1))
    try:
        return Program(
            tuple(nets),
            tuple(stages),
            tuple(sorted(set(flows))),
            num_replicas=num_replicas,
        )
    except HocketError:
        return random_program(random, num_devices, num_replicas)


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
            own = [shifts[op] for op in ops if op.stage == number]
            least = max(0, max(own) - min(own) - 1)
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
    numbers: dict[int, int] = {}
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
        stream = numbers.get(device, 0)
        numbers[device] = stream + 1
        found.append(Lane(device, stream, tuple(op for x in rounds for op in x)))
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
