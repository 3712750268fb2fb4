"""Find ops that change one thing in place without a path of events between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from hocket.core.accesses import Access, Resource
from hocket.core.checker.faults import Fault
from hocket.core.checker.happens_before import HappensBefore
from hocket.core.checker.shared import RESOURCES, Accesses
from hocket.core.schedule import Schedule
from hocket.core.simulator.columns import Columns
from hocket.core.timelines.arrays import Ints


def conflicts(
    schedule: Schedule,
    columns: Columns,
    accesses: Accesses,
    before: HappensBefore,
    order: Sequence[int],
) -> Iterator[Fault]:
    """Name the first conflict of each resource, stage and pair of lanes.

    Gradients and buffers must be changed by one op after another in every order. An op
    that reads gradients (U) needs their values, and so comes after all changes. Weights
    have no conflicts: their versions are counted (see `alive`).

    Args:
        schedule: complete, and free of deadlock.
        columns: its ops.
        accesses: what they read and change.
        before: the paths of events between them.
        order: all rows, in one order in which they may start.
    """
    found = set()
    changes = _in_order(_shared_by_lanes(accesses, columns), order)
    lanes = columns.lane[changes.row].tolist()
    keys = changes.resource, changes.stage, changes.number, changes.row
    rows = zip(*(column.tolist() for column in keys), lanes, strict=True)
    for (*one, first, lane), (*other, second, next_lane) in pairwise(rows):
        if one != other or before.before(first, second):
            continue
        resource, stage, number = one
        access = Access(RESOURCES[resource], stage, number, writes=True)
        key = resource, stage, frozenset((lane, next_lane))
        if key not in found:
            found.add(key)
            yield _fault(schedule, columns, (first, second), access)


def _shared_by_lanes(accesses: Accesses, columns: Columns) -> Accesses:
    """Return the changes of gradients and buffers that several lanes make."""
    changes = accesses.writes & ~accesses.of(Resource.WEIGHTS)
    accesses = accesses.taken(changes)
    key = accesses.stage * len(RESOURCES) + accesses.resource
    lane = columns.lane[accesses.row]
    least = np.full(key.max(initial=0) + 1, columns.num_ops)
    most = np.full(least.size, -1)
    np.minimum.at(least, key, lane)
    np.maximum.at(most, key, lane)
    return accesses.taken((least != most)[key])


def _in_order(accesses: Accesses, order: Sequence[int]) -> Accesses:
    """Sort accesses by what they use, and then by the order in which ops may start.

    Then comparing neighbours is enough: if each of them happens before the next one,
    that is their only order.
    """
    place: Ints = np.empty(len(order), np.int64)
    place[np.array(order, np.int64)] = np.arange(len(order))
    keys = place[accesses.row], accesses.number, accesses.stage, accesses.resource
    return accesses.taken(np.lexsort(keys))


def _fault(
    schedule: Schedule, columns: Columns, rows: tuple[int, int], access: Access
) -> Fault:
    first, second = (columns.describe(row, schedule) for row in rows)
    return (
        f"{first} and {second} both change {access} and no path of events orders them: "
        "put both in one lane, or let one need, directly or through other ops, a value "
        "that the other makes",
        columns.op(rows[1], schedule),
    )
