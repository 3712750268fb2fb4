"""Say which memory each op takes and releases, and what an order holds at most.

A block of memory is made by one op, and read by others. The lane that made it releases
it, as soon as that lane knows that all readers are done: only then may what the lane
runs next reuse the block, whichever lane is ahead.

    lane 0   0F0 makes b   ...   0I0 reads b       2I0 waits for 0W0: releases b first
    lane 1                            └─▶ 0W0 reads b ──────┘

So what a lane holds depends on where it stands itself, and on no other lane. The peak
is the largest sum over those pairs of ops that may run at the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from hocket.core.dataflow import makes, needs
from hocket.core.op import Kind, Op
from hocket.core.schedule import Schedule
from hocket.core.timelines.memory import MemoryCurve
from hocket.core.timelines.timeline import Timeline
from hocket.errors import PlanError

Waits: TypeAlias = Mapping[Op, tuple[Op, ...]]
Clock: TypeAlias = tuple[int, ...]  # of each lane, how many ops are known to be done


@dataclass(frozen=True, slots=True)
class Footprint:
    """The blocks of memory of one step's ops on one device.

    Args:
        sizes: the bytes of each block.
        events: what ops of a kind and stage do, in order: `+n` makes block `n - 1`,
            `-n` reads it for the last time within the op.
        always_bytes: what is there all the time: weights, states, the batch.
        work_bytes: what ops of a kind and stage take while they run, beside blocks.
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
    """What each op waits for in other lanes, and when blocks are released.

    Args:
        schedule: one step, on one device.
        waits: ops of other lanes that an op waits for; those that it must wait for
            anyway, because an earlier op of its lane does, are left out.
        before: blocks that an op's lane releases when the op may start.
        within: blocks that are released where the op reads them last.
        level_bytes: for each lane, what it holds when it comes to each op, before it
            releases what is in `before`, and at the end.
        op_bytes: for each lane, the most that it holds during each op.
        clocks: for each lane, what each op knows of the other lanes when it starts.
        always_bytes: what is there all the time.
    """

    schedule: Schedule
    waits: Waits
    before: Mapping[Op, tuple[int, ...]]
    within: Mapping[Op, frozenset[int]]
    level_bytes: tuple[tuple[int, ...], ...]
    op_bytes: tuple[tuple[int, ...], ...]
    clocks: tuple[tuple[Clock, ...], ...]
    always_bytes: int

    @property
    def peak_bytes(self) -> int:
        """An upper bound of what is held at once, for any duration of the ops."""
        if len(self.op_bytes) == 1:
            return self.always_bytes + max(self.op_bytes[0], default=0)
        pairs = max((*self._pairs(0, 1), *self._pairs(1, 0)), default=0)
        return self.always_bytes + pairs

    def _pairs(self, lane: int, other: int) -> Iterator[int]:
        """Yield the most of both lanes while each op of one lane runs."""
        beside, num = self.op_bytes[other], len(self.op_bytes[other])
        until = [clock[lane] for clock in self.clocks[other]]  # ascending
        for i, num_bytes in enumerate(self.op_bytes[lane]):
            begin = self.clocks[lane][i][other]
            # The other lane may be at any op that does not wait for this one.
            end = begin + sum(known <= i for known in until[begin:num])
            levels = self.level_bytes[other][begin : end + 1]
            yield num_bytes + max((*beside[begin:end], *levels))

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
            np.array(times, float), np.array(changes, float), self.always_bytes
        )


def plan_memory(
    schedule: Schedule, footprint: Footprint, more_waits: Waits | None = None
) -> MemoryPlan:
    """Plan the waits between the lanes of an order, and the release of its blocks.

    Args:
        schedule: one step on one device, in at most two lanes, accepted by `check`.
        footprint: the blocks of its ops.
        more_waits: ops of other lanes that ops wait for, beside those whose values
            they need: the earlier a lane knows that a reader is done, the earlier it
            releases what was read.

    Raises:
        PlanError: the order has several steps, or more than two lanes; or lanes wait
            for each other for ever.
    """
    if schedule.program.num_steps != 1 or len(schedule.lanes) > 2:
        raise PlanError(
            f"an order of {schedule.program.num_steps} steps in {len(schedule.lanes)} "
            "lanes: memory is planned for one step in one or two lanes"
        )
    waits, clocks = _clocks(schedule, more_waits or {})
    before, within = _releases(schedule, footprint, clocks)
    held = [_held(lane.ops, footprint, before, within) for lane in schedule.lanes]
    return MemoryPlan(
        schedule,
        waits,
        before,
        within,
        tuple(tuple(levels) for levels, _ in held),
        tuple(tuple(most) for _, most in held),
        clocks,
        footprint.always_bytes,
    )


def issue_order(schedule: Schedule, waits: Waits) -> Iterator[tuple[int, Op]]:
    """Yield each lane's ops so that an op comes after those that it waits for.

    Args:
        schedule: the order.
        waits: ops of other lanes that each op waits for.

    Raises:
        PlanError: lanes wait for each other for ever.
    """
    left = [list(reversed(lane.ops)) for lane in schedule.lanes]
    done: set[Op] = set()
    while any(left):
        num_done = len(done)
        for number, ops in enumerate(left):
            while ops and done.issuperset(waits.get(ops[-1], ())):
                op = ops.pop()
                done.add(op)
                yield number, op
        if len(done) == num_done:
            stuck = ", ".join(str(ops[-1]) for ops in left if ops)
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


def _releases(
    schedule: Schedule, footprint: Footprint, clocks: Sequence[Sequence[Clock]]
) -> tuple[dict[Op, tuple[int, ...]], dict[Op, frozenset[int]]]:
    before: defaultdict[Op, list[int]] = defaultdict(list)
    within: defaultdict[Op, set[int]] = defaultdict(set)
    owner: dict[int, int] = {}
    last: defaultdict[int, dict[int, int]] = defaultdict(dict)  # by block and lane
    for number, lane in enumerate(schedule.lanes):
        for i, op in enumerate(lane.ops):
            for event in footprint.of(op):
                block = abs(event) - 1
                last[block][number] = i
                if event > 0:
                    owner[block] = number
    for block, number in owner.items():
        own = last[block][number]
        others = [(j, i + 1) for j, i in last[block].items() if j != number]
        at = _first_knowing(clocks[number], own, others)
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
    """Return the first op of a lane, from `begin` on, that comes after the others."""
    for i in range(begin, len(clocks)):
        if all(clocks[i][lane] >= count for lane, count in others):
            return i
    return None


def _held(
    ops: Sequence[Op],
    footprint: Footprint,
    before: Mapping[Op, tuple[int, ...]],
    within: Mapping[Op, frozenset[int]],
) -> tuple[list[int], list[int]]:
    """Return what a lane holds when it comes to each op, and at the end; and in it."""
    sizes, held = footprint.sizes, 0
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
