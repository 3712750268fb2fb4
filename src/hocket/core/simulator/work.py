"""Turn a schedule and its costs into the plain lists that the two clocks read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np

from hocket.core.costs import Costs
from hocket.core.dataflow import maker
from hocket.core.gates import Gates
from hocket.core.op import ASYNCHRONOUS, COLLECTIVES, Kind
from hocket.core.schedule import Schedule
from hocket.core.simulator.columns import CODES, KINDS, Columns, ValueNumbers
from hocket.core.simulator.needs import (
    GIVEN,
    LOCAL,
    NEVER,
    NO_OP,
    UNREAD,
    Messages,
    Needs,
    find_messages,
    gate_waits,
)
from hocket.core.timelines.arrays import Bools, Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What has to happen before what, and how long it takes.

    What lanes wait for are *items*: item `i` is the end of op `i`; after those come
    the arrivals, and the last item never comes.

    Args:
        schedule: the schedule.
        columns: its ops.
        needs: all that they need, also what they do not wait for.
        messages: the messages between them.
        num_items: the number of ops and arrivals, and one that never comes.
        seconds: how long each op takes; a collective, until its result is there.
        is_collective: whether each op is R, G or UNSHARD.
        wait_from: where the waits of each op begin in the next two lists.
        wait_item: what an op waits for, in the order of its needs.
        wait_handling_s: what the lane spends on it then.
        post_from: where the posts of each op begin in the next list.
        post_message: the messages that an op sends or, if it is a RECV, makes room for.
    """

    schedule: Schedule
    columns: Columns
    needs: Needs
    messages: Messages
    num_items: int
    seconds: list[float]
    is_collective: list[bool]
    wait_from: list[int]
    wait_item: list[int]
    wait_handling_s: list[float]
    post_from: list[int]
    post_message: list[int]

    def describe_wait(self, row: int, has: Callable[[int], object]) -> str:
        """Name the first value that an op waits for, of those whose item is missing."""
        waits = self.wait_item[self.wait_from[row] : self.wait_from[row + 1]]
        item = next(item for item in waits if not has(item))
        program = self.schedule.program
        begin, end = np.searchsorted(self.needs.row, [row, row + 1])
        items = _items(self.columns, self.needs)[begin:end]
        if item not in items:
            maker_op = self.columns.op(item)
            return f"waits for {maker_op}, whose gradient is judged with its own"
        number = int(self.needs.value[begin + np.flatnonzero(items == item)[0]])
        value = ValueNumbers.of(program).value(number)
        return f"needs {value} of {maker(value, program)}"


def prepare(schedule: Schedule, costs: Costs, gates: Gates = ()) -> Work:
    """Collect all that the clocks must know.

    Args:
        schedule: the schedule.
        costs: the costs of its program.
        gates: the stages whose gradients are judged together.

    Raises:
        CostsError: the costs do not fit the program.
        ScheduleError: ops that are not of the program, or that are there twice.
    """
    columns = Columns.of(schedule)
    needs = Needs.of(columns, schedule.program)
    messages = find_messages(columns, needs, costs)
    waits = _is_wait(columns, needs)
    rows, items = needs.row[waits], _items(columns, needs)[waits]
    if gates:
        more_rows, more_items = gate_waits(columns, needs, gates)
        rows, items = np.append(rows, more_rows), np.append(items, more_items)
        order = np.argsort(rows, kind="stable")
        rows, items = rows[order], items[order]
    posts = np.concatenate((messages.sender, messages.receiver))
    order = np.argsort(posts, kind="stable")
    order = order[np.count_nonzero(posts == NO_OP) :]
    num_items = columns.num_ops + needs.arrivals.maker.size + 1
    return Work(
        schedule=schedule,
        columns=columns,
        needs=needs,
        messages=messages,
        num_items=num_items,
        seconds=to_list(_seconds(columns, costs)),
        is_collective=columns.is_any(COLLECTIVES).tolist(),
        wait_from=_offsets(rows, columns.num_ops),
        wait_item=items.tolist(),
        wait_handling_s=to_list(_handling_s(columns, messages, num_items, items)),
        post_from=_offsets(posts[order], columns.num_ops),
        post_message=(order % max(1, messages.num_messages)).tolist(),
    )


def to_list(column: Floats) -> list[float]:
    """Return a column as a list; equal floats share one object."""
    if column.size and (column == column[0]).all():
        return [float(column[0])] * column.size
    numbers: list[float] = column.tolist()
    return numbers


def _items(columns: Columns, needs: Needs) -> Ints:
    """Return the item that brings each need."""
    num_arrivals = needs.arrivals.maker.size
    local = np.where(needs.maker == NEVER, columns.num_ops + num_arrivals, needs.maker)
    return np.where(needs.arrival == LOCAL, local, columns.num_ops + needs.arrival)


def _is_wait(columns: Columns, needs: Needs) -> Bools:
    """Return which needs a lane may have to wait for.

    Not for what is given, nor for what its own lane has done when it comes there.
    """
    maker = np.maximum(needs.maker, 0)
    is_done = (
        (needs.maker >= 0)
        & (columns.lane[maker] == columns.lane[needs.row])
        & (maker < needs.row)
        & ~columns.is_any(ASYNCHRONOUS)[maker]
    )
    waits: Bools = ~is_done & (needs.maker != GIVEN)
    return waits


def _handling_s(
    columns: Columns, messages: Messages, num_items: int, items: Ints
) -> Floats:
    """Return what a lane spends at each wait: once per arrival, at its first reader."""
    spent_s = np.zeros(items.size)
    if messages.handling_s.any():
        is_read = messages.arrival != UNREAD
        of_item = np.zeros(num_items)
        arrived = columns.num_ops + messages.arrival[is_read]
        of_item[arrived] = messages.handling_s[is_read]
        item, first = np.unique(items, return_index=True)
        spent_s[first] = of_item[item]
    return spent_s


def _seconds(columns: Columns, costs: Costs) -> Floats:
    program = columns.schedule.program
    table = np.zeros((len(KINDS), program.num_stages))
    for stage, cost in enumerate(costs.of(program)):
        for code, kind in enumerate(KINDS):
            if kind not in ASYNCHRONOUS:
                table[code, stage] = cost.seconds(kind) + costs.op_s
        table[CODES[Kind.UNSHARD], stage] = cost.unshard_s
        table[CODES[Kind.GATHER], stage] = costs.reduce_link.all_gather_s(
            cost.output_bytes * program.num_microbatches_of(stage),
            program.num_pipelines,
        )
        table[CODES[Kind.REDUCE], stage] = costs.reduce_s(stage, program)
    seconds: Floats = table[columns.kind, columns.stage]
    return seconds * _factors(columns, costs.jitter) if costs.jitter else seconds


def _factors(columns: Columns, jitter: float) -> Floats:
    """Return how much longer than the mean each op takes, the same at every call.

    The ops of one kind and stage get the middles of equal parts of a normal
    distribution, shuffled: their sum is not changed, whatever their number.
    """
    random = np.random.default_rng(0)
    factors = np.ones(columns.num_ops)
    _, group = np.unique([columns.kind, columns.stage], axis=1, return_inverse=True)
    order = np.argsort(group, kind="stable")
    bounds = np.flatnonzero(np.diff(group[order])) + 1
    for rows in np.split(order, bounds):
        factors[rows] = 1 + jitter * random.permutation(_middles(rows.size))
    return factors


@cache
def _middles(num: int) -> Floats:
    """Return the middles of `num` equally likely parts of the normal distribution."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / num) for i in range(num)])


def _offsets(rows: Ints, num_rows: int) -> list[int]:
    """Return where each row's entries begin in a sorted column, and where all end."""
    offsets: list[int] = np.searchsorted(rows, np.arange(num_rows + 1)).tolist()
    return offsets
