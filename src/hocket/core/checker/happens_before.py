"""Find which ops happen before which, in every order that the events allow.

An op happens before another if a path leads from it to the other: along a lane, and
from the op that makes a value to the ops that need it. Each op has a vector clock: the
last op of every lane that happens before it. Source: Mattern, "Virtual Time and Global
States of Distributed Systems", 1989.

    d0    0I0 ──────▶ 0I1 ──────▶ 0U        clock of 0W0: d0 up to 0I0
             ╲            ╲         ▲       clock of 0U: d0.1 up to 0W1
    d0.1      ▶ 0W0 ──────▶ 0W1 ────╯

Only ops of one device are compared. Where it has one lane, their places in the lane
decide. So clocks speak of those lanes alone that share a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate
from typing import Final

import numpy as np

from hocket.core.accesses import Resource, access_rules
from hocket.core.op import ASYNCHRONOUS, Kind
from hocket.core.program import Program
from hocket.core.simulator.columns import CODES, KINDS, Columns
from hocket.core.simulator.needs import Needs
from hocket.core.timelines.arrays import Bools, Ints

_ALONE = -1


class HappensBefore:
    """The paths of events between ops of the same device.

    Clocks are made when two lanes are first compared, in time linear in the ops times
    the lanes that share a device. Of a clock, the lanes of its op's device are kept;
    the others as long as ops wait for it.

    Args:
        columns: the ops, as rows.
        needs: what they need.
        order: all rows, in one order in which they may start.
    """

    def __init__(self, columns: Columns, needs: Needs, order: Sequence[int]) -> None:
        self._columns, self._needs, self._order = columns, needs, order
        self._lane: list[int] = columns.lane.tolist()
        self._column, self._columns_beside = _columns_of_lanes(columns)

    def before(self, first: int, second: int) -> bool:
        """Return whether the op in row `first` always ends before `second` starts.

        An asynchronous op as `first` counts as ended only where its value is needed.
        """
        lane, other = self._lane[first], self._lane[second]
        if lane == other:
            return first < second
        column = self._column[lane] - self._columns_beside[other].start
        return first <= int(self._clocks[second, column])

    @cached_property
    def _clocks(self) -> Ints:
        """For each op, the last ops of its device's lanes that happen before it."""
        columns, column = self._columns, self._column
        begins, makers = _waits(columns, self._needs)
        num_readers = np.bincount(makers, minlength=columns.num_ops).tolist()
        is_asynchronous: list[bool] = columns.is_any(ASYNCHRONOUS).tolist()
        now = [np.full(max(column) + 1, -1)] * len(column)
        ended: dict[int, Ints] = {}  # clocks of ops that others wait for
        most = max(beside.stop - beside.start for beside in self._columns_beside)
        kept = np.full((columns.num_ops, most), -1)
        for row in self._order:
            lane = self._lane[row]
            clock = now[lane]
            for maker in makers[begins[row] : begins[row + 1]]:
                clock = np.maximum(clock, ended[maker])
                num_readers[maker] -= 1
                if not num_readers[maker]:
                    del ended[maker]
            if column[lane] != _ALONE:
                known = clock[self._columns_beside[lane]]
                kept[row, : known.size] = known
            if num_readers[row]:
                ended[row] = _advanced(clock, column[lane], row)
            # A lane goes on before an asynchronous op has what it needs.
            if not is_asynchronous[row]:
                now[lane] = clock
        return kept


def _advanced(clock: Ints, column: int, row: int) -> Ints:
    """Return a clock that also knows an op itself."""
    if column == _ALONE:
        return clock
    advanced = clock.copy()
    advanced[column] = max(row, int(clock[column]))
    return advanced


def _columns_of_lanes(columns: Columns) -> tuple[list[int], list[slice]]:
    """Return each lane's column in the clocks, and those of its device's lanes.

    The lanes of a device stand beside each other. One that is alone has no column.
    """
    lanes_of: dict[int, list[int]] = {}
    for lane, first in enumerate(columns.first[:-1]):
        if first < columns.first[lane + 1]:
            lanes_of.setdefault(int(columns.device[first]), []).append(lane)
    column = [_ALONE] * (len(columns.first) - 1)
    beside = [slice(0, 0)] * len(column)
    begin = 0
    for lanes in lanes_of.values():
        if len(lanes) == 1:
            continue
        end = begin + len(lanes)
        for place, lane in enumerate(lanes, start=begin):
            column[lane], beside[lane] = place, slice(begin, end)
        begin = end
    return column, beside


def _waits(columns: Columns, needs: Needs) -> tuple[list[int], list[int]]:
    """Return the ops that each op waits for, as offsets into one flat list.

    An op of the same lane is not waited for unless it is asynchronous.
    """
    maker = np.maximum(needs.maker, 0)
    elsewhere = columns.lane[maker] != columns.lane[needs.row]
    waits = (needs.maker >= 0) & (elsewhere | columns.is_any(ASYNCHRONOUS)[maker])
    rows = np.arange(columns.num_ops + 1)
    begins: Ints = np.searchsorted(needs.row[waits], rows)
    return begins.tolist(), maker[waits].tolist()


# List every access of every op, as columns of numbers.

RESOURCES: Final = tuple(Resource)


@dataclass(frozen=True, slots=True, eq=False)
class Accesses:
    """Every access of every op, in no order; one row each.

    Args:
        row: the op's row.
        resource: the place of what is used in `RESOURCES`.
        stage: the stage that owns it.
        number: as in `Access`.
        writes: whether it is changed.
    """

    row: Ints
    resource: Ints
    stage: Ints
    number: Ints
    writes: Bools

    def of(self, resource: Resource) -> Bools:
        """Select the accesses of one resource."""
        found: Bools = self.resource == RESOURCES.index(resource)
        return found

    def taken(self, which: Bools | Ints) -> Accesses:
        """Return a selection of the accesses."""
        return Accesses(*(getattr(self, column.name)[which] for column in fields(self)))


def find_accesses(columns: Columns, program: Program) -> Accesses:
    """Fill in the rules of access for every op of a schedule."""
    key = columns.kind * program.num_stages + columns.stage
    order = np.argsort(key, kind="stable")
    present, first = np.unique(key[order], return_index=True)
    found: dict[str, list[Ints]] = {column.name: [] for column in fields(Accesses)}
    for code, rows in zip(present.tolist(), np.split(order, first[1:]), strict=True):
        kind, stage = divmod(code, program.num_stages)
        for rule in access_rules(KINDS[kind], stage, program):
            step = columns.step[rows] + rule.shift
            found["row"].append(rows)
            found["resource"].append(0 * rows + RESOURCES.index(rule.resource))
            found["stage"].append(0 * rows + rule.stage)
            found["number"].append(np.maximum(0, step) * rule.is_numbered)
            found["writes"].append(0 * rows + rule.writes)
    none = np.zeros(0, np.int64)
    joined = {name: np.concatenate([none, *parts]) for name, parts in found.items()}
    writes = joined.pop("writes").astype(bool)
    return Accesses(**joined, writes=writes)


# Count the versions of weights and the sums of gradients alive at once.
#
# Counted over every order that the events allow. A version of the weights lives until
# every op that reads it has happened before an update:
#
#     d0    0F0@1        0B0@1    reads version 0        with the update in a lane of
#     d0.1         0U             makes version 1        its own, both are alive: two

# The rows of some of the ops that use a resource, by its number.
_Users = dict[int, list[int]]


def count_alive(
    program: Program, columns: Columns, accesses: Accesses, before: HappensBefore
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the most that is alive at once, over every order that events allow.

    Args:
        program: the schedule's program.
        columns: the ops of a complete schedule that is free of deadlock.
        accesses: what they read and change.
        before: the paths of events between them.

    Returns:
        By stage, the versions of its weights, and its sums of gradients, one per step;
        0 if it is not trained.
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
    return (
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
