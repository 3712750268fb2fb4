"""Gather sharded stages before their weights are read, and release them behind."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final, Literal, TypeAlias

from hocket.core.op import READS_WEIGHTS, SHARDING, Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.errors import PlanError
from hocket.passes.segments import filtered, rewritten

Keep: TypeAlias = Literal["step", "run", "op"]
Keeps: TypeAlias = Keep | Mapping[int, Keep]
KEEPS: Final[tuple[Keep, ...]] = ("step", "run", "op")  # from fewest gathers to most
_Window: TypeAlias = tuple[int, int]  # the places of its first and its last reader


def add_gathers(schedule: Schedule, keeps: Keeps = "step") -> Schedule:
    r"""Write UNSHARD and RESHARD into an order of sharded stages.

    A gather begins one op ahead of the first that reads it, to go on beside that op,
    unless the stage is released or updated, or its step begins, in between. RESHARD
    stands directly behind the last op that reads it. Stage 0, beside stage 1:

                0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1
        step    ├─────────────────────────────┤       ├  whole: an op reads it
        run     ├─────┤             ┌┄┄┄├─────┤       ┤  RESHARD
        op      ├─┤ ├─┤             ┌┄┄┄├─┤ ├─┤       ┌  UNSHARD, one op ahead

    Args:
        schedule: an order without delays, copies, and several lanes on a device; those
            of its UNSHARD and RESHARD are placed again, so that it may follow any
            other pass. One without shards (num_shards is 1) stays as it is.
        keeps: how long each stage stays whole, for all stages or by stage: from the
            first to the last op of a step that reads its weights ("step"), as long as
            no other stage computes on its device ("run"), or for each op ("op"). All
            need the same weights; fewer gathers are faster, and hold more memory.

    Raises:
        PlanError: it holds what cannot be sharded, or `keeps` is no such choice.

    >>> text = "steps 1\nreplicas 1\nshards 2\nnet model microbatches=2\n"
    >>> text += "stage 0 net=model device=0\nd0  0F0 0F1 0B0 0B1 0R 0U"
    >>> print(str(add_gathers(Schedule.parse(text))).splitlines()[-1])
    d0  0UNSHARD0 0F0 0F1 0B0 0B1 0RESHARD0 0R 0U
    >>> print(str(add_gathers(Schedule.parse(text), "op")).splitlines()[-1][:53])
    d0  0UNSHARD0 0F0 0RESHARD0 0UNSHARD1 0F1 0RESHARD1 0
    """
    program = schedule.program
    if program.num_shards == 1:
        return schedule
    _refuse_what_is_not_built(schedule)
    by_stage = _by_stage(keeps, program)
    bare = drop_gathers(schedule)
    return _numbered(
        rewritten(
            bare,
            lambda ops: [
                op
                for part in _steps(ops, has_body=bool(bare.body))
                for op in _with_gathers(part, by_stage)
            ],
        )
    )


def drop_gathers(schedule: Schedule) -> Schedule:
    """Return the order as it was before `add_gathers`."""
    if schedule.kinds.isdisjoint(SHARDING):
        return schedule
    return filtered(schedule, lambda op: op.kind not in SHARDING)


def _refuse_what_is_not_built(schedule: Schedule) -> None:
    fault = next(_not_built(schedule), None)
    if fault is not None:
        num = schedule.program.num_shards
        raise PlanError(f"the program has num_shards={num}, but {fault}")


def _not_built(schedule: Schedule) -> Iterator[str]:
    program = schedule.program
    alone = "use num_replicas in place of num_shards"
    for number, stage in enumerate(program.stages):
        if stage.delay:
            yield (
                f"stage {number} has delay {stage.delay}, and older versions of shards "
                f"are not built: choose an order without delays, such as 1f1b, or "
                f"{alone}"
            )
    for group in program.copies:
        yield (
            f"stages {' '.join(map(str, group))} are copies of one another, and shards "
            f"of copies are not built: choose an order without, such as 1f1b, or "
            f"{alone}"
        )
    for device in range(program.num_devices):
        num_lanes = len(schedule.lanes_of(device))
        if num_lanes > 1:
            yield (
                f"device {device} has {num_lanes} lanes, and gathers for several are "
                f"not built: put the device's ops in one lane, or {alone}"
            )
    if not schedule.body:
        yield from _overlapping_steps(schedule)


def _overlapping_steps(schedule: Schedule) -> Iterator[str]:
    for lane in schedule.lanes:
        for before, op in pairwise(lane.ops):
            if op.step < before.step:
                yield (
                    f"{op} on device {lane.device} stands behind {before}, in an order "
                    "without a body: finish each step before the next one begins, or "
                    "mark the body by |: and :|"
                )


def _by_stage(keeps: Keeps, program: Program) -> Mapping[int, Keep]:
    stages = range(program.num_stages)
    by_stage = dict.fromkeys(stages, keeps) if isinstance(keeps, str) else dict(keeps)
    missing = [stage for stage in stages if stage not in by_stage]
    foreign = [stage for stage in by_stage if stage not in stages]
    if missing or foreign:
        what = f"stage {missing[0]} is left out" if missing else f"{foreign[0]} is none"
        raise PlanError(
            f"keeps names stages {sorted(by_stage)}, but the program has stages 0 to "
            f"{program.num_stages - 1}, of which {what}: name each of them"
        )
    for stage, keep in by_stage.items():
        if keep not in KEEPS:
            raise PlanError(
                f"keeps is {keep!r} for stage {stage}: choose one of {', '.join(KEEPS)}"
            )
    return by_stage


def _steps(ops: Sequence[Op], *, has_body: bool) -> Iterator[Sequence[Op]]:
    """Cut a lane into its steps; a piece of a lane with a body stays as it is."""
    begin = 0
    for i, op in enumerate(ops):
        if not has_body and op.step != ops[begin].step:
            yield ops[begin:i]
            begin = i
    yield ops[begin:]


def _with_gathers(ops: Sequence[Op], keeps: Mapping[int, Keep]) -> Iterable[Op]:
    """Return the ops of one step, or of one repetition, with gathers around them."""
    ahead = _one_op_ahead(ops)
    earliest: defaultdict[int, int] = defaultdict(int)
    unshards: defaultdict[int, list[tuple[int, Op]]] = defaultdict(list)
    reshards: dict[int, Op] = {}
    updates = {(op.stage, i) for i, op in enumerate(ops) if op.kind is Kind.UPDATE}
    for first, last in sorted(_windows(ops, keeps)):
        op = ops[first]
        updated = (i + 1 for stage, i in updates if stage == op.stage and i < first)
        begin = max(ahead[first], earliest[op.stage], *updated, 0)
        gather = Op(Kind.UNSHARD, op.stage, 0, op.step)
        unshards[begin].append((first, gather))
        reshards[last] = gather.as_kind(Kind.RESHARD)
        earliest[op.stage] = last + 1
    placed: list[Op] = []
    for i, op in enumerate(ops):
        placed += [gather for _, gather in sorted(unshards[i], key=lambda x: x[0])]
        placed.append(op)
        if i in reshards:
            placed.append(reshards[i])
    return placed


def _one_op_ahead(ops: Sequence[Op]) -> list[int]:
    """Return for each op the place of the last compute before it, or its own place."""
    places, before = [], 0
    for i, op in enumerate(ops):
        places.append(before)
        if op.kind in READS_WEIGHTS:
            before = i
    return places


def _windows(ops: Sequence[Op], keeps: Mapping[int, Keep]) -> Iterator[_Window]:
    """Yield from which op to which op a stage stays whole, stage by stage."""
    open_at: dict[int, tuple[_Window, int]] = {}  # by stage, with the step
    for i, op in enumerate(ops):
        stage, keep = op.stage, keeps[op.stage]
        if op.kind in READS_WEIGHTS:
            for other in [s for s in open_at if s != stage and keeps[s] == "run"]:
                yield open_at.pop(other)[0]
        if op.kind is Kind.UPDATE and stage in open_at:
            yield open_at.pop(stage)[0]
        if op.kind not in READS_WEIGHTS:
            continue
        window, step = open_at.pop(stage, ((i, i), op.step))
        if window[0] != i and (keep == "op" or step != op.step):
            yield window
            window = (i, i)
        open_at[stage] = (window[0], i), op.step
    yield from (window for window, _ in open_at.values())


def _numbered(schedule: Schedule) -> Schedule:
    """Return the order with its gathers counted from 0, per stage and step."""
    lanes = []
    for lane in schedule.lanes:
        counts: Counter[tuple[int, int]] = Counter()
        ops = []
        for op in lane.ops:
            if op.kind in SHARDING:
                key = op.stage, op.step
                counts[key] += op.kind is Kind.UNSHARD
                ops.append(Op(op.kind, op.stage, counts[key] - 1, op.step))
            else:
                ops.append(op)
        lanes.append(replace(lane, ops=tuple(ops)))
    return replace(schedule, lanes=tuple(lanes))
