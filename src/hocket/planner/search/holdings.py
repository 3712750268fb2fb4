"""Which ops hold memory from when to when, without a clock.

`core/simulator/memory.py` says what is held and for how long; here are those of its
rows that the order of one lane decides. A message is counted from when it is read, not
from when it is on its way, unless asked for: so no order that fits is lost, and what
the queues hold is seen when an order is simulated. Left to that, too: older versions
of weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from hocket.core.costs import Costs, StageCost
from hocket.core.op import BACKWARDS, Kind, Op
from hocket.core.program import Program
from hocket.core.simulator.needs import LOCAL
from hocket.planner.search.problem import Problem


class Instant(NamedTuple):
    """The start or the end of an op, by its row."""

    row: int
    is_end: bool


class Holding(NamedTuple):
    """Bytes on a device, from one instant to another.

    Args:
        device: the device.
        begin: when they are allocated; None if they are there from the beginning.
        end: when they are released, before allocations at the same instant; None if
            never.
        num_bytes: the bytes; at least 1.
    """

    device: int
    begin: Instant | None
    end: Instant
    num_bytes: int


def always_bytes(program: Program, costs: Costs) -> tuple[int, ...]:
    """Return what each device always holds: weights and optimizer state."""
    num_bytes = [0] * program.num_devices
    for stage, cost in zip(program.stages, costs.of(program), strict=True):
        num_bytes[stage.device] += cost.weight_bytes
        num_bytes[stage.device] += cost.optimizer_bytes * stage.trainable
    return tuple(num_bytes)


def holdings(
    problem: Problem, costs: Costs, *, counts_queues: bool = False
) -> tuple[Holding, ...]:
    """Return everything that is allocated and released.

    Args:
        problem: the program's ops.
        costs: the program's costs.
        counts_queues: count messages from when they are made, not from when they are
            read. Then a lane could make room by waiting, which no lane does.
    """
    rows = _HoldingRows(problem, costs)
    found = (*rows.of_ops(), *rows.received(counts_queues), *rows.kept_outputs())
    return tuple(holding for holding in found if holding.num_bytes > 0)


class _HoldingRows:
    """The ops by name, and what each of them holds."""

    def __init__(self, problem: Problem, costs: Costs) -> None:
        self.problem = problem
        self.row = {op: row for row, op in enumerate(problem.ops)}
        self.costs = costs.of(problem.program)
        self.accumulates = costs.accumulates

    def of_ops(self) -> Iterator[Holding]:
        for row, op in enumerate(self.problem.ops):
            cost = self.costs[op.stage]
            yield self._from_to(Instant(row, False), row, _at_work(op, cost))
            match op.kind:
                case Kind.FORWARD if self._trains(op):
                    begin, back = Instant(row, False), self._backward(op)
                    yield self._from_to(begin, back, cost.kept_bytes)
                case Kind.FORWARD:
                    begin = Instant(row, False)
                    yield self._from_to(begin, row, cost.activation_bytes)
                case Kind.BACKWARD_WEIGHT:
                    begin = Instant(self._backward(op), True)
                    yield self._from_to(begin, row, cost.weight_grad_held_bytes)
                case Kind.UPDATE if self._trains(op):
                    first = None if self.accumulates else self._first_gradient(op)
                    yield self._from_to(first, row, cost.gradient_bytes)
                case _:
                    pass

    def received(self, counts_queues: bool) -> Iterator[Holding]:
        """Yield received messages, until their last use."""
        needs, messages = self.problem.work.needs, self.problem.work.messages
        seen: set[int] = set()
        columns = needs.row.tolist(), needs.maker.tolist(), needs.arrival.tolist()
        for row, maker, arrival in zip(*columns, strict=True):
            if arrival != LOCAL and arrival not in seen:
                seen.add(arrival)
                num_bytes = int(messages.num_bytes[arrival])
                begin = Instant(maker, True) if counts_queues else Instant(row, False)
                yield self._from_to(begin, self._release(row), num_bytes)

    def kept_outputs(self) -> Iterator[Holding]:
        """Yield outputs that another stage of the same device reads."""
        needs, ops = self.problem.work.needs, self.problem.ops
        columns = needs.row.tolist(), needs.maker.tolist(), needs.arrival.tolist()
        seen: set[int] = set()
        for row, maker, arrival in zip(*columns, strict=True):
            if arrival != LOCAL or maker < 0 or maker in seen:
                continue
            made = ops[maker]
            if made.stage == ops[row].stage or made.kind is Kind.UPDATE:
                continue
            seen.add(maker)
            cost = self.costs[made.stage]
            is_output = made.kind is Kind.FORWARD
            num_bytes = cost.output_bytes if is_output else cost.input_grad_bytes
            yield self._from_to(Instant(maker, True), self._release(row), num_bytes)

    def _from_to(self, begin: Instant | None, row: int, num_bytes: int) -> Holding:
        stage = self.problem.ops[row].stage
        device = self.problem.program.stages[stage].device
        return Holding(device, begin, Instant(row, True), num_bytes)

    def _trains(self, op: Op) -> bool:
        return self.problem.program.stages[op.stage].trainable

    def _find(self, op: Op, kinds: Sequence[Kind]) -> int:
        """Return the row of the same microbatch's op of the first of these kinds."""
        others = (Op(kind, op.stage, op.microbatch, op.step) for kind in kinds)
        return next(self.row[other] for other in others if other in self.row)

    def _backward(self, op: Op) -> int:
        return self._find(op, (Kind.BACKWARD, Kind.BACKWARD_INPUT))

    def _release(self, row: int) -> int:
        """Return the last op that uses what this one read."""
        op = self.problem.ops[row]
        if op.kind is not Kind.FORWARD or not self._trains(op):
            return row
        if self.costs[op.stage].holds_input:
            return self._find(op, _MAKES_WEIGHT_GRAD)
        return self._backward(op)

    def _first_gradient(self, update: Op) -> Instant:
        """Return the step's first gradient: microbatches go in order."""
        first = Op(Kind.FORWARD, update.stage, 0, update.step)
        return Instant(self._find(first, _MAKES_WEIGHT_GRAD), True)


_MAKES_WEIGHT_GRAD: Final = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


def _at_work(op: Op, cost: StageCost) -> int:
    """Return what an op holds only while it runs."""
    again = cost.activation_bytes - cost.kept_bytes if op.kind in BACKWARDS else 0
    return again + cost.work_bytes(op.kind)
