"""Find which ops happen before which, in every order that the events allow.

An op happens before another if a path leads from it to the other: along a lane, and
from the op that makes a value to the ops that need it. Each op has a vector clock: the
last op of every lane that happens before it. Source: Mattern, "Virtual Time and Global
States of Distributed Systems", 1989.

    d0    0I0 ──────▶ 0I1 ──────▶ 0U        clock of 0W0: d0 up to 0I0
             ╲            ╲         ▲       clock of 0U: d0.1 up to 0W1
    d0.1      ▶ 0W0 ──────▶ 0W1 ────╯
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hocket.core.op import ASYNCHRONOUS
from hocket.core.simulator.columns import Columns
from hocket.core.simulator.needs import Needs
from hocket.core.timelines.arrays import Ints

_Clock = list[int]


class HappensBefore:
    """The paths of events between the ops of a schedule.

    Time and memory are linear in ops times lanes; a clock is shared by ops of a lane
    until one of them waits for something new.

    Args:
        columns: the ops, as rows.
        needs: what they need.
        order: all rows, in one order in which they may start.
    """

    def __init__(self, columns: Columns, needs: Needs, order: Sequence[int]) -> None:
        self._lane: list[int] = columns.lane.tolist()
        self._clock: list[_Clock] = [[]] * columns.num_ops
        asynchronous = columns.is_any(ASYNCHRONOUS)
        begins, makers = _waits(columns, needs)
        now: list[_Clock] = [[-1] * (len(columns.first) - 1)] * (len(columns.first) - 1)
        is_asynchronous: list[bool] = asynchronous.tolist()
        for row in order:
            lane = self._lane[row]
            clock = now[lane]
            for maker in makers[begins[row] : begins[row + 1]]:
                clock = self._joined(clock, maker)
            self._clock[row] = clock
            # A lane goes on before an asynchronous op has what it needs.
            if not is_asynchronous[row]:
                now[lane] = clock

    def before(self, first: int, second: int) -> bool:
        """Return whether the op in row `first` always ends before `second` starts.

        An asynchronous op as `first` counts as ended only where its value is needed.
        """
        lane = self._lane[first]
        if lane == self._lane[second]:
            return first < second
        return first <= self._clock[second][lane]

    def _joined(self, clock: _Clock, maker: int) -> _Clock:
        """Return a clock that also knows an op and what happened before it."""
        lane = self._lane[maker]
        if maker <= clock[lane]:
            return clock
        joined = list(map(max, clock, self._clock[maker]))
        joined[lane] = max(joined[lane], maker)
        return joined


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
