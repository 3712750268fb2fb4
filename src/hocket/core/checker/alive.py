"""Count the versions of weights and the sums of gradients alive at once.

Counted over every order that the events allow. A version of the weights lives until
every op that reads it has happened before an update:

    d0    0F0@1        0B0@1     reads version 0        with the update in a lane of its
    d0.1         0U              makes version 1        own, both are alive: two
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from hocket.core.accesses import Resource
from hocket.core.checker.happens_before import HappensBefore
from hocket.core.checker.shared import Accesses
from hocket.core.op import Kind
from hocket.core.program import Program
from hocket.core.simulator.columns import CODES, Columns
from hocket.core.timelines.arrays import Bools, Ints

# The rows of some of the ops that use a resource, by its number.
_Users = dict[int, list[int]]


@dataclass(frozen=True, slots=True)
class Alive:
    """What is alive at once, by stage.

    Args:
        num_versions: versions of the stage's weights.
        num_gradients: sums of gradients, one per step; 0 if it is not trained.
    """

    num_versions: tuple[int, ...]
    num_gradients: tuple[int, ...]


def count_alive(
    program: Program, columns: Columns, accesses: Accesses, before: HappensBefore
) -> Alive:
    """Return the most that is alive at once, over every order that events allow.

    Args:
        program: the schedule's program.
        columns: the ops of a complete schedule that is free of deadlock.
        accesses: what they read and change.
        before: the paths of events between them.
    """
    lane = columns.lane[accesses.row]
    weights, gradients = accesses.of(Resource.WEIGHTS), accesses.of(Resource.GRADIENTS)
    is_update = columns.kind[accesses.row] == CODES[Kind.UPDATE]
    is_reduce = columns.kind[accesses.row] == CODES[Kind.REDUCE]
    adds = gradients & ~is_update & ~is_reduce
    writers = _users(accesses, lane, weights & accesses.writes)
    readers = _users(accesses, lane, weights & ~accesses.writes, last=True)
    adders = _users(accesses, lane, adds)
    stages = range(program.num_stages)
    return Alive(
        tuple(
            _most_versions(writers.get(s, {}), readers.get(s, {}), before)
            for s in stages
        ),
        tuple(
            _most_gradients(writers.get(s, {}), adders.get(s, {}), before)
            for s in stages
        ),
    )


def _users(
    accesses: Accesses, lane: Ints, which: Bools, *, last: bool = False
) -> dict[int, _Users]:
    """Return, by stage and number, the first op of every lane, or the last one."""
    taken = accesses.taken(which)
    sign = -1 if last else 1
    order = np.lexsort((sign * taken.row, lane[which], taken.number, taken.stage))
    keys = np.stack((taken.stage, taken.number, lane[which]))[:, order]
    is_first = np.ones(order.size, bool)
    is_first[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    taken = taken.taken(order[is_first])
    columns = taken.stage.tolist(), taken.number.tolist(), taken.row.tolist()
    users: dict[int, _Users] = {}
    for stage, number, row in zip(*columns, strict=True):
        users.setdefault(stage, {}).setdefault(number, []).append(row)
    return users


def _most_versions(writers: _Users, readers: _Users, before: HappensBefore) -> int:
    """Return the most versions of a stage's weights.

    Just after an update that starts as early as it may, all ops that need not happen
    before it are still to come: then the versions that they read are alive.
    """
    most, alive = 1, [readers.get(0, [])]
    for version in sorted(writers):
        (writer,) = writers[version]
        alive = [
            rows for rows in alive if not all(before.before(r, writer) for r in rows)
        ]
        most = max(most, 1 + len(alive))
        alive.append(readers.get(version, []))
    return most


def _most_gradients(writers: _Users, adders: _Users, before: HappensBefore) -> int:
    """Return the most steps whose gradients are begun and not yet applied.

    Where the update of step `k` comes as late as it may, the gradients of step `u` are
    begun before it unless it happens before all ops that add to them.
    """
    if not adders:
        return 0
    updates = [writers[version][0] for version in sorted(writers)]
    changes = [0] * (len(updates) + 1)
    for step in range(len(updates)):
        first = step  # the first update before which they may be begun
        while first and not all(
            before.before(updates[first - 1], row) for row in adders[step]
        ):
            first -= 1
        changes[first] += 1
        changes[step + 1] -= 1
    return max(accumulate(changes))
