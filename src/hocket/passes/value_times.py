"""Compute when ops can start while a pass writes an order, one op after another.

The times are those of `simulate` where no message waits for another one on its link.
"""

from __future__ import annotations

from hocket.core.costs import Costs
from hocket.core.dataflow import Fact, Value, is_given, is_sent, makes, needs
from hocket.core.gates import Gates, stage_gates, with_gate
from hocket.core.op import ASYNCHRONOUS, Op
from hocket.core.program import Program


class ValueTimes:
    """Records when each value is made, op by op."""

    def __init__(self, program: Program, costs: Costs, gates: Gates = ()) -> None:
        """Begin with no value made; values given from outside count as ready.

        Args:
            program: what is ordered.
            costs: the costs of its program.
            gates: the stages whose updates wait for each other's gradients.
        """
        self.program = program
        self.gate_of = stage_gates(gates)
        self.costs = costs
        self.stage_costs = costs.of(program)
        self.made_s: dict[Value, float] = {}
        self._needed: dict[tuple[Op, int], list[tuple[Value, float]]] = {}

    def arrivals(self, op: Op, device: int) -> list[tuple[Value, float | None, float]]:
        """Return each needed value, when it was made, and the seconds of its transfer.

        The time is None where the value is not made yet.
        """
        made_s = self.made_s.get
        return [
            (value, made_s(value), transfer_s)
            for value, transfer_s in self._transfers(op, device)
        ]

    def ready_s(self, op: Op, device: int) -> float | None:
        """Return when an op has all that it needs; None if that is not known yet."""
        latest_s = 0.0
        for _, made_s, transfer_s in self.arrivals(op, device):
            if made_s is None:
                return None
            latest_s = max(latest_s, made_s + transfer_s)
        return latest_s

    def seconds(self, op: Op) -> float:
        """Return how long an op occupies its lane."""
        if op.kind in ASYNCHRONOUS:
            return 0.0
        return self.stage_costs[op.stage].seconds(op.kind) + self.costs.op_s

    def do(self, op: Op, start_s: float) -> float:
        """Do an op; return when it ends."""
        end_s = start_s + self.seconds(op)
        for value in makes(op, self.program):
            self.made_s[value] = end_s
        return end_s

    def _transfers(self, op: Op, device: int) -> list[tuple[Value, float]]:
        """Return each value that an op waits for, and the seconds of its transfer."""
        found = self._needed.get((op, device))
        if found is None:
            stages = self.program.stages
            found = self._needed[op, device] = [
                (value, self._message_s(value, at))
                for one in with_gate(op, self.gate_of)
                for at in (device if one is op else stages[one.stage].device,)
                for value in needs(one, self.program)
                if not is_given(value)
            ]
        return found

    def _message_s(self, value: Value, device: int) -> float:
        if not is_sent(value, device, self.program):
            return 0.0
        source = self.program.stages[value.stage].device
        cost = self.stage_costs[value.stage]
        is_output = value.fact is Fact.OUTPUT
        num_bytes = cost.output_bytes if is_output else cost.input_grad_bytes
        transfer_s = self.costs.link_between(source, device).message_s(num_bytes)
        return transfer_s + 2 * self.costs.handling.message_s(num_bytes)
