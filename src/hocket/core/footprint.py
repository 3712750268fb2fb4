"""Plans when each block of memory is released, and bounds the peak of an order.

One op allocates a block, and others read it. The lane that allocated it releases it at
the first op by which all readers are known to be done: readers in this lane because
they come earlier, those in another lane because this lane has waited for an event
behind them. (An allocator gives a released block to the next op of the same lane.)

    lane 0   0F0 allocates b   ...   0I0 reads b       2I0 waits for 0W0: releases b
    lane 1                                └─▶ 0W0 reads b ──────┘

So the bytes that a lane holds at an op are the same for every timing of the other lane.
The peak is the largest sum over all pairs of ops that no event orders.

Where W and U of some stages run in the next step, the plan is that of the part which
repeats: ops of a step, and those carried over from the step before. What these read is
kept from one repetition to the next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from hocket.core.dataflow import makes, needs
from hocket.core.op import Kind, Op
from hocket.core.schedule import Schedule
from hocket.core.timelines.memory import MemoryCurve
from hocket.core.timelines.timeline import Timeline
from hocket.core.walk import Walk
from hocket.errors import PlanError

Waits: TypeAlias = Mapping[Op, tuple[Op, ...]]
Clock: TypeAlias = tuple[int, ...]  # of each lane, how many ops are known to be done


@dataclass(frozen=True, slots=True)
class Footprint:
    """The blocks of memory of one step's ops on one device.

    Args:
        sizes: the bytes of each block.
        events: for each kind and stage, what the op does with blocks, in order: `+n`
            allocates block `n - 1`, `-n` is the op's last read of it.
        always_bytes: the bytes of tensors that are never released: weights, optimizer
            states, the batch.
        work_bytes: for each kind and stage, the bytes that kernels allocate and release
            while the op runs, beside the blocks.
    """

    sizes: tuple[int, ...]
    events: Mapping[tuple[Kind, int], tuple[int, ...]]
    always_bytes: int = 0
    work_bytes: Mapping[tuple[Kind, int], int] = field(default_factory=dict)

    def of(self, op: Op) -> tuple[int, ...]:
        """Return the events of an op."""
        return self.events.get((op.kind, op.stage), ())


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The events between lanes, and the ops at which blocks are released.

    Args:
        schedule: one step, on one device.
        waits: for each op, the ops of other lanes whose events it waits for; those that
            an earlier op of its lane has waited for are left out.
        before: the blocks that are released when the op's waits are over, before it
            runs.
        within: the blocks that are released inside of the op, at its last read.
        level_bytes: for each lane, the bytes that it holds between ops: when it comes
            to each op, before the release of `before`, and behind the last op.
        op_bytes: for each lane, the most bytes that it holds during each op.
        clocks: for each op of each lane, how many ops of every lane are known to be
            done when it starts (a vector clock).
        always_bytes: see `Footprint`.
        carried: the ops that belong to the step before.
        kept: the blocks that they read, and ops of the step before have made.
    """

    schedule: Schedule
    waits: Waits
    before: Mapping[Op, tuple[int, ...]]
    within: Mapping[Op, frozenset[int]]
    level_bytes: tuple[tuple[int, ...], ...]
    op_bytes: tuple[tuple[int, ...], ...]
    clocks: tuple[tuple[Clock, ...], ...]
    always_bytes: int
    carried: frozenset[Op] = frozenset()
    kept: frozenset[int] = frozenset()

    @property
    def kept_bytes(self) -> int:
        """The bytes that are kept from one step to the next."""
        return sum(levels[0] for levels in self.level_bytes)

    @property
    def peak_bytes(self) -> int:
        """An upper bound of the bytes held at once, for every timing of the lanes."""
        if len(self.op_bytes) == 1:
            return self.always_bytes + max(self.op_bytes[0], default=0)
        pairs = max((*self._pairs(0, 1), *self._pairs(1, 0)), default=0)
        return self.always_bytes + pairs

    def _pairs(self, lane: int, other: int) -> Iterator[int]:
        """Yield, for each op of one lane, the most bytes of both lanes meanwhile."""
        beside, num = self.op_bytes[other], len(self.op_bytes[other])
        until = [clock[lane] for clock in self.clocks[other]]  # ascending
        for i, num_bytes in enumerate(self.op_bytes[lane]):
            begin = self.clocks[lane][i][other]
            # The other lane may be at any op that does not wait for this one.
            end = begin + sum(known <= i for known in until[begin:num])
            levels = self.level_bytes[other][begin : end + 1]
            yield num_bytes + max((*beside[begin:end], *levels))

    def bound_curve(self) -> MemoryCurve:
        """Return the peak, at all times."""
        return MemoryCurve.of_changes(np.zeros(0), np.zeros(0), self.peak_bytes)

    def curve(self, timeline: Timeline) -> MemoryCurve:
        """Return the bytes over time, when ops happen as in a timeline.

        Args:
            timeline: a timeline of the same schedule.
        """
        times: list[float] = []
        changes: list[int] = []
        for lane, of_ops in enumerate(self.op_bytes):
            levels = self.level_bytes[lane]
            for i, most in enumerate(of_ops):
                times += [timeline.start_s[lane][i], timeline.end_s[lane][i]]
                changes += [most - levels[i], levels[i + 1] - most]
        return MemoryCurve.of_changes(
            np.array(times, float),
            np.array(changes, float),
            self.always_bytes + self.kept_bytes,
        )


def plan_memory(
    schedule: Schedule, footprint: Footprint, more_waits: Waits | None = None
) -> MemoryPlan:
    """Plan the events between the lanes of an order, and the release of its blocks.

    Args:
        schedule: one step on one device, in at most two lanes, accepted by `check`; or
            the part of an order that repeats, with ops of two steps.
        footprint: the blocks of its ops.
        more_waits: for some ops, ops of other lanes to wait for that make nothing they
            need. A lane that waits for a reader may release what it read.

    Raises:
        PlanError: the order has more than two steps or lanes, or lanes wait for each
            other for ever.
    """
    ops = [op for lane in schedule.lanes for op in lane.ops]
    steps = {op.step for op in ops}
    if len(steps) > 2 or len(schedule.lanes) > 2:
        raise PlanError(
            f"an order of {len(steps)} steps in {len(schedule.lanes)} lanes: memory is "
            "planned for one step, or the part that repeats, in one or two lanes"
        )
    carried = frozenset(op for op in ops if op.step < max(steps))
    kept = _kept(footprint, carried)
    waits, clocks = _clocks(schedule, more_waits or {})
    owner, readers = _readers(schedule, footprint, carried, kept)
    before, within = _releases(schedule, clocks, owner, readers)
    held = [
        _held(
            lane.ops,
            footprint,
            before,
            within,
            sum(footprint.sizes[block] for block in kept if owner[block] == number),
        )
        for number, lane in enumerate(schedule.lanes)
    ]
    return MemoryPlan(
        schedule,
        waits,
        before,
        within,
        tuple(tuple(levels) for levels, _ in held),
        tuple(tuple(most) for _, most in held),
        clocks,
        footprint.always_bytes,
        carried,
        kept,
    )


def issue_order(schedule: Schedule, waits: Waits) -> Iterator[tuple[int, Op]]:
    """Yield all ops with their lane's number, each behind those that it waits for.

    Args:
        schedule: the order.
        waits: ops of other lanes that each op waits for.

    Raises:
        PlanError: lanes wait for each other for ever.
    """
    done: set[Op] = set()

    def lacks(op: Op) -> Op | None:
        return next((x for x in waits.get(op, ()) if x not in done), None)

    walk = Walk([lane.ops for lane in schedule.lanes], lacks)
    for number, op in walk:
        done.add(op)
        walk.come(op)
        yield number, op
    if walk.heads:
        stuck = ", ".join(map(str, walk.heads.values()))
        raise PlanError(f"lanes wait for each other for ever, at {stuck}")


def _clocks(
    schedule: Schedule, more_waits: Waits
) -> tuple[dict[Op, tuple[Op, ...]], tuple[tuple[Clock, ...], ...]]:
    program, num_lanes = schedule.program, len(schedule.lanes)
    place = {
        op: (number, i)
        for number, lane in enumerate(schedule.lanes)
        for i, op in enumerate(lane.ops)
    }
    maker = {value: op for op in place for value in makes(op, program)}
    sources = {
        op: [
            *(maker[value] for value in needs(op, program) if value in maker),
            *more_waits.get(op, ()),
        ]
        for op in place
    }
    known = [[0] * num_lanes for _ in range(num_lanes)]
    after: dict[Op, list[int]] = {}
    waits: dict[Op, tuple[Op, ...]] = {}
    clocks: list[list[Clock]] = [[] for _ in range(num_lanes)]
    across = {op: tuple(sources[op]) for op in place}
    for number, op in issue_order(schedule, across):
        clock = known[number]
        latest: dict[int, Op] = {}
        for source in sources[op]:
            lane, position = place[source]
            if lane != number and position >= clock[lane]:
                clock[lane] = position + 1
                latest[lane] = source
        for source in latest.values():
            clock[:] = map(max, clock, after[source])
        clock[number] = place[op][1]
        waits[op] = tuple(latest.values())
        clocks[number].append(tuple(clock))
        after[op] = [*clock]
        after[op][number] += 1
    return waits, tuple(map(tuple, clocks))


def _kept(footprint: Footprint, carried: Collection[Op]) -> frozenset[int]:
    """Return the blocks that carried ops read and do not make."""
    events = [event for op in carried for event in footprint.of(op)]
    made = {event - 1 for event in events if event > 0}
    return frozenset(-event - 1 for event in events if event < 0) - made


Readers: TypeAlias = Mapping[int, Mapping[int, int]]


def _readers(
    schedule: Schedule,
    footprint: Footprint,
    carried: Collection[Op],
    kept: Collection[int],
) -> tuple[dict[int, int], Readers]:
    """Return the lane that allocates each block, and its last reader in each lane.

    Of a kept block only carried ops count: others read, or make, that of their own
    step, which stays until the next one.
    """
    owner: dict[int, int] = {}
    last: defaultdict[int, dict[int, int]] = defaultdict(dict)  # by block and lane
    for number, lane in enumerate(schedule.lanes):
        for i, op in enumerate(lane.ops):
            for event in footprint.of(op):
                block = abs(event) - 1
                if block not in kept or op in carried:
                    last[block][number] = i
                if event > 0:
                    owner[block] = number
    return owner, last


def _releases(
    schedule: Schedule,
    clocks: Sequence[Sequence[Clock]],
    owner: Mapping[int, int],
    readers: Readers,
) -> tuple[dict[Op, tuple[int, ...]], dict[Op, frozenset[int]]]:
    before: defaultdict[Op, list[int]] = defaultdict(list)
    within: defaultdict[Op, set[int]] = defaultdict(set)
    for block, number in owner.items():
        own = readers[block].get(number, -1)
        others = [(j, i + 1) for j, i in readers[block].items() if j != number]
        at = _first_knowing(clocks[number], max(own, 0), others)
        if at is None:
            continue
        op = schedule.lanes[number].ops[at]
        if at == own:
            within[op].add(block)
        else:
            before[op].append(block)
    return (
        {op: tuple(blocks) for op, blocks in before.items()},
        {op: frozenset(blocks) for op, blocks in within.items()},
    )


def _first_knowing(
    clocks: Sequence[Clock], begin: int, others: Sequence[tuple[int, int]]
) -> int | None:
    """Return the first op of a lane, from `begin` on, that starts behind all readers.

    Args:
        clocks: the clocks of the lane's ops.
        begin: the lane's own last reader.
        others: for each other lane with readers, its number, and how many of its ops
            must be done.

    Returns:
        None where the lane never waits for them: the block stays until the step ends.
    """
    for i in range(begin, len(clocks)):
        if all(clocks[i][lane] >= count for lane, count in others):
            return i
    return None


def _held(
    ops: Sequence[Op],
    footprint: Footprint,
    before: Mapping[Op, tuple[int, ...]],
    within: Mapping[Op, frozenset[int]],
    held: int,
) -> tuple[list[int], list[int]]:
    """Return a lane's `level_bytes` and `op_bytes` (see `MemoryPlan`).

    Args:
        ops: the lane's ops.
        footprint: the blocks of its ops.
        before: see `MemoryPlan`.
        within: see `MemoryPlan`.
        held: the bytes that the lane holds in the beginning.
    """
    sizes = footprint.sizes
    levels, most = [], []
    for op in ops:
        levels.append(held)  # until the op may start, the lane still holds `before`
        held -= sum(sizes[block] for block in before.get(op, ()))
        peak, released = held, within.get(op, frozenset())
        for event in footprint.of(op):
            block = abs(event) - 1
            if event > 0:
                held += sizes[block]
                peak = max(peak, held)
            elif block in released:
                held -= sizes[block]
        most.append(peak + footprint.work_bytes.get((op.kind, op.stage), 0))
    return [*levels, held], most
