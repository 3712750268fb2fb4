"""Find the messages: one per value and device that needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from hocket.core.costs import Costs, Link, StageCost
from hocket.core.dataflow import Fact
from hocket.core.op import MESSAGES, RECEIVES, SENDS, Kind
from hocket.core.program import Program
from hocket.core.simulator.columns import FACTS, HINT, Columns, ValueNumbers
from hocket.core.simulator.needs import Needs
from hocket.core.timelines.arrays import Floats, Ints
from hocket.errors import ScheduleError

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
