"""Find what each op waits for: other ops, and arrivals from other devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from hocket.core.dataflow import NEVER_SENT, Fact, is_given, make_rules, need_rules
from hocket.core.gates import Gates
from hocket.core.op import ASYNCHRONOUS, READS_WEIGHTS, Kind
from hocket.core.program import Program
from hocket.core.simulator.columns import (
    CODES,
    FACTS,
    HINT,
    Columns,
    ValueNumbers,
    fill,
)
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
        if program.num_shards > 1:
            readers, gathered = _gathers_read(columns, program)
            row, value = np.append(row, readers), np.append(value, gathered)
            order = np.argsort(row, kind="stable")
            row, value = row[order], value[order]
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


def _gathers_read(columns: Columns, program: Program) -> tuple[Ints, Ints]:
    """Return the ops that read whole weights, and the value that each reads.

    It is what the last UNSHARD of the stage makes, of those before it in its lane.
    """
    key = columns.lane * program.num_stages + columns.stage
    order = np.argsort(key, kind="stable")
    is_gather = columns.kind[order] == CODES[Kind.UNSHARD]
    last = np.maximum.accumulate(np.where(is_gather, np.arange(order.size), -1))
    gather = order[last]
    reads = columns.is_any(READS_WEIGHTS)[order]
    reads &= (last >= 0) & (key[gather] == key[order])
    gather = gather[reads]
    value = ValueNumbers.of(program).number(
        np.full(gather.size, FACTS.index(Fact.WHOLE_WEIGHTS)),
        *(columns.stage[gather], columns.step[gather], columns.microbatch[gather]),
    )
    return order[reads], value


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


# Find what a gate's updates wait for: the last gradient op of each lane.
#
# d0  0F0 0F1 0B0 0B1 0U           one gate over both stages
# d1  1F0 1B0 1F1 1B1 .... 1U      1U waits for 0B1, which ends last
def gate_waits(columns: Columns, needs: Needs, gates: Gates) -> tuple[Ints, Ints]:
    """Return pairs of rows, in two columns: an update, and an op that it waits for.

    Args:
        columns: the ops.
        needs: what each op needs itself.
        gates: the stages whose gradients are judged together.
    """
    lane = columns.lane.tolist()
    # The lane goes on before such an op has ended.
    is_asynchronous = columns.is_any(ASYNCHRONOUS).tolist()
    pairs = [
        (update, maker)
        for updates in _gates_in_steps(columns, gates)
        for maker in _last_makers(needs, updates, lane, is_asynchronous)
        for update in updates
        if lane[maker] != lane[update] or maker > update or is_asynchronous[maker]
    ]
    rows, makers = np.array(pairs, np.int64).reshape(-1, 2).T
    return rows, makers


def _gates_in_steps(columns: Columns, gates: Gates) -> Iterator[list[int]]:
    """Yield the updates of each gate in each step."""
    several = (gate for gate in gates if len(gate) > 1)
    gate_of = {stage: number for number, gate in enumerate(several) for stage in gate}
    found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for row in np.flatnonzero(columns.kind == CODES[Kind.UPDATE]).tolist():
        gate = gate_of.get(int(columns.stage[row]))
        if gate is not None:
            found[gate, int(columns.step[row])].append(row)
    yield from found.values()


def _last_makers(
    needs: Needs, updates: list[int], lane: list[int], is_asynchronous: list[bool]
) -> list[int]:
    """Return of each lane the last op, and the last collective, that updates need."""
    last: dict[tuple[int, bool], int] = {}
    begins = np.searchsorted(needs.row, updates).tolist()
    ends = np.searchsorted(needs.row, updates, side="right").tolist()
    for begin, end in zip(begins, ends, strict=True):
        for maker in needs.maker[begin:end].tolist():
            if maker >= 0:
                key = lane[maker], is_asynchronous[maker]
                last[key] = max(last.get(key, maker), maker)
    return [*last.values()]
