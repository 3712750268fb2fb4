"""What each op of a schedule waits for: other ops, and arrivals from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from hocket.errors import ScheduleError
from hocket.plan.arrays import Ints
from hocket.plan.dataflow import is_given, make_rules, need_rules
from hocket.plan.program import Program
from hocket.plan.simulator.columns import HINT, Columns
from hocket.plan.simulator.values import ValueNumbers, fill

NEVER: Final = -1  # no op of the schedule makes the value
GIVEN: Final = -2  # it exists before any work is done
LOCAL: Final = -1  # it is made on the device that needs it


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals:
    """Values that are needed on another device than their own, once per such device.

    Args:
        value: its number.
        device: where it is needed.
        maker: the row of the op that makes it; arrivals are sorted by it.
    """

    value: Ints
    device: Ints
    maker: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Needs:
    """Every pair of an op and a value that it needs, sorted by op.

    Args:
        row: of the op.
        value: the number of the value.
        maker: the row of the op that makes it, or NEVER or GIVEN.
        arrival: which of `arrivals` brings it, or LOCAL.
        arrivals: what must come from other devices.
    """

    row: Ints
    value: Ints
    maker: Ints
    arrival: Ints
    arrivals: Arrivals

    @classmethod
    def of(cls, columns: Columns, program: Program) -> Needs:
        """Find the maker of each value that is needed.

        Raises:
            ScheduleError: two ops make the same value.
        """
        makers = _makers(columns, program)
        row, value = fill(columns, program, partial(need_rules, program=program))
        maker = makers[value]
        numbers = ValueNumbers.of(program)
        unmade = np.unique(value[maker == NEVER])
        given = [number for number in unmade if is_given(numbers.value(number))]
        makers[np.array(given, np.int64)] = GIVEN
        maker = makers[value]

        # Remote needs, by the op that makes the value and the device that wants it.
        device = columns.device
        remote = np.flatnonzero((maker >= 0) & (device[maker] != device[row]))
        wish = value[remote] * program.num_devices + device[row[remote]]
        wishes, first, which = np.unique(wish, return_index=True, return_inverse=True)
        arrivals = Arrivals(
            *np.divmod(wishes, program.num_devices), maker[remote[first]]
        )
        order = np.lexsort((arrivals.device, arrivals.maker))
        place = np.empty_like(order)
        place[order] = np.arange(order.size)
        arrival = np.full(row.size, LOCAL)
        arrival[remote] = place[which]
        sorted_arrivals = Arrivals(
            arrivals.value[order], arrivals.device[order], arrivals.maker[order]
        )
        return cls(row, value, maker, arrival, sorted_arrivals)


def _makers(columns: Columns, program: Program) -> Ints:
    """For each value the row of the op that makes it, or NEVER."""
    row, value = fill(columns, program, make_rules)
    makers = np.full(ValueNumbers.of(program).size, NEVER)
    makers[value] = row
    twice = np.flatnonzero(makers[value] != row)
    if twice.size:
        made = ValueNumbers.of(program).value(value[twice[0]])
        raise ScheduleError((f"two ops make {made}{HINT}",))
    return makers
