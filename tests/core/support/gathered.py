"""What is right of gathers, a second time: by looking at each stage by itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from hocket.core.op import READS_WEIGHTS, SHARDING, Kind, Op
from hocket.core.schedule import Schedule

_LETTERS: Final = {
    Kind.UNSHARD: "<",
    Kind.RESHARD: ">",
    Kind.UPDATE: "u",
    **dict.fromkeys(READS_WEIGHTS, "x"),
}
_OF_A_STEP: Final = re.compile(r"(<x+>)*u?")


def is_gathered_right(schedule: Schedule) -> bool:
    """Whether UNSHARD and RESHARD of an order without body stand where they must.

    A stage's gathers, readers and update, written as letters, are `<xx>...<x>u` in each
    step, one step after another; and no op of another step stands within a gather.
    """
    return all(_is_right(lane.ops) for lane in schedule.lanes)


def _is_right(ops: tuple[Op, ...]) -> bool:
    for stage in {op.stage for op in ops}:
        own = [op for op in ops if op.stage == stage and op.kind in _LETTERS]
        steps = [op.step for op in own]
        if steps != sorted(steps):
            return False
        for step in set(steps):
            now = [op for op in own if op.step == step]
            if not _OF_A_STEP.fullmatch("".join(_LETTERS[op.kind] for op in now)):
                return False
            for kind in SHARDING:
                numbers = [op.microbatch for op in now if op.kind is kind]
                if numbers != [*range(len(numbers))]:
                    return False
    return all(
        {op.step for op in ops[begin : ops.index(gather.as_kind(Kind.RESHARD))]}
        == {gather.step}
        for begin, gather in enumerate(ops)
        if gather.kind is Kind.UNSHARD
    )


def with_one_moved(schedule: Schedule) -> Iterator[Schedule]:
    """Every order with one UNSHARD or RESHARD removed, doubled, or moved."""
    for number, lane in enumerate(schedule.lanes):
        for place, op in enumerate(lane.ops):
            if op.kind not in SHARDING:
                continue
            without = lane.ops[:place] + lane.ops[place + 1 :]
            yield _with_lane(schedule, number, without)
            for ops in (without, lane.ops):
                for i in range(len(ops) + 1):
                    moved = (*ops[:i], op, *ops[i:])
                    yield _with_lane(schedule, number, moved)


def _with_lane(schedule: Schedule, number: int, ops: tuple[Op, ...]) -> Schedule:
    lanes = list(schedule.lanes)
    lanes[number] = replace(lanes[number], ops=ops)
    return replace(schedule, lanes=tuple(lanes))
