"""A student's order, and the same filled with a teacher's forwards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from hocket.core.costs import Costs
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.passes.fill_with import fill_with


@dataclass(frozen=True)
class Case:
    """A base schedule of one step, and what it is filled with.

    Args:
        base: the student's order.
        program: the student and its teacher.
        costs: of both.
    """

    base: Schedule
    program: Program
    costs: Costs

    @property
    def first(self) -> int:
        """The number of the student's first stage."""
        return self.program.num_stages - self.base.program.num_stages

    def filled(self, num_steps: int) -> Schedule:
        """The filled order for as many steps."""
        return _filled(self, num_steps)

    def makespan_s(self, num_steps: int) -> float:
        """How long the filled order takes for as many steps."""
        return simulate(self.filled(num_steps), self.costs).makespan_s

    def step_s(self) -> float:
        """How long a step takes in a long run."""
        return (self.makespan_s(12) - self.makespan_s(8)) / 4

    def student_costs(self) -> Costs:
        """The costs of the student alone."""
        return Costs(self.costs.stages[self.first :])

    def work_s(self) -> float:
        """What the device with most work does in a step."""
        order = self.filled(8)
        return max(
            sum(self.costs.stages[op.stage].seconds(op.kind) for op in lane.ops) / 8
            for lane in order.lanes
        )


@lru_cache(maxsize=8)  # the tests of a case ask for some orders again
def _filled(case: Case, num_steps: int) -> Schedule:
    program = replace(case.program, num_steps=num_steps)
    return fill_with(case.base, program, costs=case.costs)
