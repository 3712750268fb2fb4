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
from functools import cached_property

import numpy as np

from hocket.core.op import ASYNCHRONOUS
from hocket.core.simulator.columns import Columns
from hocket.core.simulator.needs import Needs
from hocket.core.timelines.arrays import Ints

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
