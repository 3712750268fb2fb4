"""Find what each op waits for: other ops, and arrivals from other devices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from hocket.core.dataflow import NEVER_SENT, is_given, make_rules, need_rules
from hocket.core.program import Program
from hocket.core.simulator.columns import HINT, Columns
from hocket.core.simulator.values import FACTS, ValueNumbers, fill
from hocket.core.timelines.arrays import Ints
from hocket.errors import ScheduleError

NEVER: Final = -1  # no op of the schedule makes the value
GIVEN: Final = -2  # it exists before any work is done
LOCAL: Final = -1  # it is made on the device that needs it, or by a collective
_IS_SENT: Final = np.array([fact not in NEVER_SENT for fact in FACTS])


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
        row: the op's row.
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
        numbers = ValueNumbers.of(program)
        makers = _makers(columns, program)
        row, value = fill(columns, program, partial(need_rules, program=program))
        unmade = np.unique(value[makers[value] == NEVER]).tolist()
        given = [number for number in unmade if is_given(numbers.value(number))]
        makers[np.array(given, np.int64)] = GIVEN
        maker = makers[value]

        # One arrival for all needs of one value on one device that is not its own.
        device = columns.device
        fact, _ = numbers.fact_and_stage(value)
        is_sent = (maker >= 0) & (device[maker] != device[row]) & _IS_SENT[fact]
        remote = np.flatnonzero(is_sent)
        fact = fact[remote]
        wish = maker[remote] * program.num_devices + device[row[remote]]
        _, first, which = np.unique(
            wish * len(FACTS) + fact, return_index=True, return_inverse=True
        )
        first = remote[first]
        arrival = np.full(row.size, LOCAL)
        arrival[remote] = which
        arrivals = Arrivals(value[first], device[row[first]], maker[first])
        return cls(row, value, maker, arrival, arrivals)


def _makers(columns: Columns, program: Program) -> Ints:
    """Return, for each value, the row of the op that makes it, or NEVER."""
    row, value = fill(columns, program, make_rules)
    makers = np.full(ValueNumbers.of(program).size, NEVER)
    makers[value] = row
    twice = np.flatnonzero(makers[value] != row)
    if twice.size:
        made = ValueNumbers.of(program).value(value[twice[0]])
        raise ScheduleError((f"two ops make {made}{HINT}",))
    return makers
