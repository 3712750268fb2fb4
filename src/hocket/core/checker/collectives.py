"""Check that all members of a collective post it in the same order.

    d0  ... 3R ... 0R       stage 3 is a copy of stage 1, and stage 0 of stage 2:
    d1  ... 1R ... 2R       both devices post the pair 1, 3 before the pair 0, 2

The members of a collective are the replicas of a device, which play the same lanes, and
the devices of stages that are copies of one another. NCCL matches calls by their order
alone: where two members differ, gradients of different stages would be added up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import numpy as np

from hocket.core.checker.faults import Fault
from hocket.core.checker.happens_before import HappensBefore
from hocket.core.op import COLLECTIVES, Kind, Op
from hocket.core.simulator.work import Work

# What makes two devices' ops one collective: the kind, the stages and the step.
_Call = tuple[Kind, tuple[int, ...], int]


def collective_faults(
    work: Work, before: HappensBefore, order: Sequence[int]
) -> Iterator[Fault]:
    """Find lanes or devices that may post collectives in different orders.

    Args:
        work: a schedule that is complete and free of deadlock.
        before: the paths of events between its ops.
        order: all rows, in one order in which they may start.
    """
    columns = work.columns
    is_collective = columns.is_any(COLLECTIVES)
    if not is_collective.any():
        return
    rows = np.array(order, np.int64)
    of_device: dict[int, list[int]] = defaultdict(list)
    for row in rows[is_collective[rows]].tolist():
        of_device[int(columns.device[row])].append(row)
    for device, posts in of_device.items():
        yield from _lane_faults(work, before, device, posts)
    yield from _device_faults(work, of_device)


def _lane_faults(
    work: Work, before: HappensBefore, device: int, posts: Sequence[int]
) -> Iterator[Fault]:
    """Find the first two collectives of a device that no path of events orders."""
    for first, second in pairwise(posts):
        if not before.before(first, second):
            a, b = (work.columns.describe(r, work.schedule) for r in (first, second))
            yield (
                f"device {device} may post {a} and {b} in either order, but "
                "its replicas or copies must post them in the same one: put both in "
                "one lane",
                _op(work, second),
            )
            return


def _device_faults(work: Work, of_device: dict[int, list[int]]) -> Iterator[Fault]:
    """Find the first collectives that two devices post in different orders."""
    calls = {
        device: {_call(_op(work, row), work): _op(work, row) for row in posts}
        for device, posts in sorted(of_device.items())
    }
    for (one, ops), (other, others) in combinations(calls.items(), 2):
        mine = [call for call in ops if call in others]
        theirs = [call for call in others if call in ops]
        for place, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if a != b:
                yield (
                    f"device {one} posts {ops[a]} as collective {place} of those that "
                    f"it shares with device {other}, which posts {others[b]} there: "
                    "post them in the same order on both devices",
                    ops[a],
                )
                break


def _call(op: Op, work: Work) -> _Call:
    return op.kind, work.schedule.program.copies_of[op.stage], op.step


def _op(work: Work, row: int) -> Op:
    return work.columns.op(row, work.schedule)
