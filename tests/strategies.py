"""Hypothesis strategies: ops, programs, valid orders of them, shapes of schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Final

from hypothesis import strategies as st

from hocket.core.costs import StageCost
from hocket.core.dataflow import Value, due_ops, is_given, makes, needs
from hocket.core.op import MESSAGES, ONCE_PER_STEP, Kind, Op
from hocket.core.program import Net, Program, Stage
from hocket.core.schedule import Lane, Schedule
from hocket.errors import ShapeError
from hocket.schedules import SCHEDULES, Shape

_SMALL = st.integers(0, 120)


@st.composite
def ops(draw: st.DrawFn) -> Op:
    """Any op that can be written down, whether or not a program has it."""
    kind = draw(st.sampled_from(Kind))
    return Op(
        kind,
        stage=draw(_SMALL),
        microbatch=None if kind in ONCE_PER_STEP else draw(_SMALL),
        step=draw(_SMALL),
        peer=draw(_SMALL) if kind in MESSAGES else None,
    )


@st.composite
def chains(draw: st.DrawFn) -> Program:
    """One trainable net whose stages follow each other, on up to 3 devices."""
    devices = _without_gaps(draw(st.lists(st.integers(0, 2), min_size=1, max_size=5)))
    return Program.chain(
        devices,
        draw(st.integers(1, 3)),
        num_steps=draw(st.integers(1, 3)),
        num_replicas=draw(st.integers(1, 2)),
        **draw(st.sampled_from(_LOSSES)),
        delays=[draw(st.integers(0, 2)) for _ in devices],
    )


_LOSSES: Final[tuple[dict[str, bool], ...]] = (
    {},
    {"batch_loss": True},
    {"batch_loss": True, "loss_over_replicas": True},
)


@st.composite
def teacher_student_programs(draw: st.DrawFn) -> Program:
    """A teacher whose last stage flows into the student's last stage.

    Teacher stage `j` stands before all student stages and may follow student stage `j`.
    The student's loss is over the whole batch, or per microbatch: over its own samples,
    with a teacher of finer or coarser microbatches, or over the teacher's whole batch.
    """
    devices = _without_gaps(draw(st.lists(st.integers(0, 2), min_size=1, max_size=3)))
    count, moves = len(devices), draw(st.booleans())
    delay = draw(st.integers(0, 1)) if moves else 0
    teacher = [
        Stage("teacher", device, False, delay, (count + j,) if moves else ())
        for j, device in enumerate(devices)
    ]
    student = [Stage("student", device) for device in devices]
    inside = [(j, j + 1) for j in range(2 * count - 1) if j != count - 1]
    into_loss = count - 1, 2 * count - 1
    reads_batch, batch_loss = draw(st.booleans()), draw(st.booleans())
    sizes = st.integers(1, 3)
    num_from, num_to = draw(sizes), draw(sizes)
    if not reads_batch and not batch_loss:
        num_from, num_to = draw(st.permutations([num_from, num_from * num_to]))
    over_replicas = batch_loss and draw(st.booleans())
    return Program(
        (Net("teacher", num_from), Net("student", num_to, batch_loss, over_replicas)),
        (*teacher, *student),
        (*inside, into_loss),
        num_steps=draw(st.integers(1, 3)),
        num_replicas=draw(st.integers(1, 2)),
        whole_batch_flows=frozenset(
            {into_loss} if reads_batch and not batch_loss else ()
        ),
    )


@st.composite
def nets_with_skips(draw: st.DrawFn) -> Program:
    """Chains in which some outputs are read by later stages, too."""
    chain = draw(chains())
    ends = [(a, b) for b in range(chain.num_stages) for a in range(b - 1)]
    skips = draw(st.sets(st.sampled_from(ends), max_size=3)) if ends else set()
    return replace(chain, flows=(*chain.flows, *sorted(skips)))


def programs() -> st.SearchStrategy[Program]:
    """Chains with delays and skips, and teachers with students."""
    return st.one_of(chains(), nets_with_skips(), teacher_student_programs())


@st.composite
def orders(draw: st.DrawFn, of: st.SearchStrategy[Program] | None = None) -> Schedule:
    """A valid schedule of any program, in an unusual order.

    Ops are taken one by one from those whose needs are met, and added to the lane of
    their device; each backward may be split.
    """
    program = draw(programs() if of is None else of)
    random = Random(draw(st.integers(0, 2**16)))
    due = [half for op in due_ops(program) for half in _maybe_split(op, random)]
    random.shuffle(due)
    lanes: list[list[Op]] = [[] for _ in range(program.num_devices)]
    for op in taken_when_ready(due, program):
        lanes[program.stages[op.stage].device].append(op)
    return Schedule(
        program, tuple(Lane(d, 0, tuple(lane)) for d, lane in enumerate(lanes))
    )


@st.composite
def lane_orders(
    draw: st.DrawFn, of: st.SearchStrategy[Program] | None = None
) -> Schedule:
    """Any order of any program, each device's ops dealt out to one or two lanes."""
    order = draw(orders(of))
    random = Random(draw(st.integers(0, 2**16)))
    lanes: list[Lane] = []
    for lane in order.lanes:
        num_lanes = random.randint(1, 2)
        dealt: list[list[Op]] = [[] for _ in range(num_lanes)]
        for op in lane.ops:
            dealt[random.randrange(num_lanes)].append(op)
        lanes += [Lane(lane.device, i, tuple(ops)) for i, ops in enumerate(dealt)]
    return replace(order, lanes=tuple(lanes))


def shares() -> st.SearchStrategy[StageCost]:
    """What a device's whole share of the model costs; every op takes time."""
    seconds = st.integers(1, 6).map(float)
    return st.builds(
        StageCost, forward_s=seconds, input_grad_s=seconds, weight_grad_s=seconds
    )


def equal_shares() -> st.SearchStrategy[StageCost]:
    """The same, with F, I and W equally long."""
    return st.integers(1, 6).map(lambda s: StageCost(float(s), float(s), float(s)))


@st.composite
def shapes(draw: st.DrawFn, name: str) -> Shape:
    """Numbers that the schedule of this name takes."""
    shape = draw(st.sampled_from(accepted(name)))
    return replace(
        shape,
        num_steps=draw(st.integers(1, 3)),
        num_replicas=draw(st.integers(1, 2)),
    )


@cache
def accepted(name: str) -> tuple[Shape, ...]:
    """All small shapes of one step that the schedule of this name takes."""
    return tuple(shape for shape in _small_shapes() if _takes(name, shape))


def largest(name: str) -> Shape:
    """The last of them, which is found without making all others."""
    return next(x for x in reversed([*_small_shapes()]) if _takes(name, x))


def _small_shapes() -> Iterator[Shape]:
    for p in range(1, 6):
        for m in range(1, 13):
            yield from (Shape(p, m, v) for v in range(1, 4))


def _takes(name: str, shape: Shape) -> bool:
    try:
        SCHEDULES[name].make(shape)
    except ShapeError:
        return False
    return True


def _without_gaps(numbers: Sequence[int]) -> list[int]:
    """The same list with its values renamed to 0, 1, 2 ..."""
    names = {number: i for i, number in enumerate(sorted(set(numbers)))}
    return [names[number] for number in numbers]


def _maybe_split(op: Op, random: Random) -> tuple[Op, ...]:
    if op.kind is Kind.BACKWARD and random.random() < 1 / 2:
        halves = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        return tuple(replace(op, kind=kind) for kind in halves)
    return (op,)


def taken_when_ready(due: list[Op], program: Program) -> Iterator[Op]:
    """All ops, each as soon as what it needs is there; empties the list."""
    made: set[Value] = set()
    while due:
        op = next(
            op
            for op in due
            if all(is_given(need) or need in made for need in needs(op, program))
        )
        due.remove(op)
        made.update(makes(op, program))
        yield op
