"""Find what each op waits for: other ops, and messages from other devices.

There is one message per value and device that needs it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from hocket.core.costs import Costs, Link, StageCost
from hocket.core.dataflow import NEVER_SENT, Fact, is_given, make_rules, need_rules
from hocket.core.gates import Gates
from hocket.core.op import ASYNCHRONOUS, MESSAGES, READS_WEIGHTS, RECEIVES, SENDS, Kind
from hocket.core.program import Program
from hocket.core.simulator.columns import (
    CODES,
    FACTS,
    HINT,
    Columns,
    ValueNumbers,
    fill,
)
from hocket.core.timelines.arrays import Floats, Ints
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


NO_OP: Final = -1
UNREAD: Final = -1
_NOWHERE: Final = -1


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """Every message, sorted by sender and then by the device it goes to.

    Where the schedule holds no message ops, each arrival has one message, and has its
    place too; the op that makes the value sends it when it has ended.

    Args:
        maker: the row of the op that made what is sent.
        sender: the row of the op that sends it: a SEND, or the maker itself.
        receiver: the row of the RECV, or NO_OP where messages are implicit.
        arrival: which arrival it is, or UNREAD if no op needs it.
        from_device: where it comes from.
        to_device: where it goes.
        num_bytes: its size.
        link: messages with the same number share a link.
        occupied_s: how long it keeps others off the link.
        latency_s: from then until it is usable.
        handling_s: what it costs the lane that sends it, and the one that reads it.
    """

    maker: Ints
    sender: Ints
    receiver: Ints
    arrival: Ints
    from_device: Ints
    to_device: Ints
    num_bytes: Ints
    link: Ints
    occupied_s: Floats
    latency_s: Floats
    handling_s: Floats

    @property
    def num_messages(self) -> int:
        """How many there are."""
        return self.maker.size

    @property
    def is_explicit(self) -> bool:
        """Whether they are ops of the schedule."""
        return bool((self.receiver != NO_OP).any())


def find_messages(columns: Columns, needs: Needs, costs: Costs) -> Messages:
    """Return the messages of a schedule, and what they cost.

    Raises:
        ScheduleError: a SEND without its RECV, or the other way round.
    """
    program, arrivals = columns.schedule.program, needs.arrivals
    if not columns.is_any(MESSAGES).any():
        receiver = np.full(arrivals.maker.size, NO_OP)
        ends = arrivals.maker, receiver, np.arange(receiver.size)
        return _with_costs(
            program, costs, ends, arrivals.maker, arrivals.value, arrivals.device
        )
    sends, receives = _matched(columns)
    need = np.searchsorted(needs.row, sends)  # a SEND needs one value: what it sends
    value, to_device = needs.value[need], columns.device[receives]
    arrival = _places(
        value * program.num_devices + to_device,
        arrivals.value * program.num_devices + arrivals.device,
    )
    ends = sends, receives, arrival
    return _with_costs(program, costs, ends, needs.maker[need], value, to_device)


def _matched(columns: Columns) -> tuple[Ints, Ints]:
    """Return the rows of all SENDs, ascending, and of the RECV of each."""
    numbers = ValueNumbers.of(columns.schedule.program)
    is_send = columns.is_any(SENDS)
    is_forward = columns.is_any(frozenset({Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD}))
    source = np.where(is_send, columns.stage, columns.peer)
    target = np.where(is_send, columns.peer, columns.stage)
    key = numbers.number(
        is_forward.astype(np.int64), source, columns.step, columns.microbatch
    )
    key = key * numbers.num_stages + target
    sends = np.flatnonzero(is_send)
    receives = np.flatnonzero(columns.is_any(RECEIVES))
    receive_of = _places(key[sends], key[receives])
    send_of = _places(key[receives], key[sends])
    lonely = [
        *sends[receive_of == _NOWHERE].tolist(),
        *receives[send_of == _NOWHERE].tolist(),
    ]
    for row in lonely[:1]:
        what = columns.describe(row)
        raise ScheduleError((f"{what} has nothing at its other end{HINT}",))
    return sends, receives[receive_of]


def _places(wanted: Ints, among: Ints) -> Ints:
    """Return each number's place in a list, or -1 where it is missing."""
    if not among.size:
        return np.full(wanted.size, _NOWHERE)
    order = np.argsort(among)
    near = np.searchsorted(among, wanted, sorter=order)
    place = order[np.minimum(near, among.size - 1)]
    return np.where(among[place] == wanted, place, _NOWHERE)


class _Route(NamedTuple):
    """What the messages of one fact and stage to one device have in common."""

    from_device: int
    to_device: int
    num_bytes: int
    link: Link
    handling_s: float

    @property
    def occupied_s(self) -> float:
        """How long each of them keeps others off the link."""
        return self.link.occupied_s(self.num_bytes)


def _with_costs(
    program: Program,
    costs: Costs,
    ends: tuple[Ints, Ints, Ints],
    maker: Ints,
    value: Ints,
    to_device: Ints,
) -> Messages:
    """Look up the costs of each route once, and apply them to its messages."""
    sender, receiver, arrival = ends
    fact, stage = ValueNumbers.of(program).fact_and_stage(value)
    key = (fact * program.num_stages + stage) * program.num_devices + to_device
    keys, which = np.unique(key, return_inverse=True)
    routes = _routes(keys, program, costs)
    return Messages(
        maker,
        sender,
        receiver,
        arrival,
        np.array([route.from_device for route in routes], np.int64)[which],
        to_device,
        np.array([route.num_bytes for route in routes], np.int64)[which],
        np.array(_link_numbers(routes), np.int64)[which],
        np.array([route.occupied_s for route in routes], float)[which],
        np.array([route.link.latency_s for route in routes], float)[which],
        np.array([route.handling_s for route in routes], float)[which],
    )


def _routes(keys: Ints, program: Program, costs: Costs) -> list[_Route]:
    stage_costs, handling = costs.of(program), costs.handling
    routes = []
    for key in keys.tolist():
        rest, target = divmod(key, program.num_devices)
        fact, stage = divmod(rest, program.num_stages)
        source, cost = program.stages[stage].device, stage_costs[stage]
        num_bytes = _num_bytes(FACTS[fact], stage, cost, program)
        link = costs.link_between(source, target)
        handling_s = handling.message_s(num_bytes)
        routes.append(_Route(source, target, num_bytes, link, handling_s))
    return routes


def _num_bytes(fact: Fact, stage: int, cost: StageCost, program: Program) -> int:
    """Return the size of one message: one microbatch, or all of all replicas."""
    if fact is Fact.GATHERED:
        num_outputs = program.num_microbatches_of(stage) * program.num_pipelines
        return cost.output_bytes * num_outputs
    return cost.output_bytes if fact is Fact.OUTPUT else cost.input_grad_bytes


def _link_numbers(routes: list[_Route]) -> list[int]:
    """Number the links; routes that share a link get the same number.

    On a link where messages take no time they do not wait for each other: each pair has
    its own, so that the fast clock may be used.
    """
    shared = {route.link.name for route in routes if route.occupied_s > 0} - {""}
    numbers: dict[str | tuple[int, int], int] = {}
    return [
        numbers.setdefault(
            name if name in shared else (route.from_device, route.to_device),
            len(numbers),
        )
        for route in routes
        for name in (route.link.name,)
    ]
