"""Decides when to stop because evaluations no longer improve."""

from __future__ import annotations

from enum import Enum
from math import isnan
from typing import Any, assert_never

from hocket.errors import ConfigError, DataError
from hocket.run.data.loss import TOTAL
from hocket.run.data.metrics import EvaluationResult


class Goal(Enum):
    """Whether lower or higher values of a metric are better."""

    LOWEST = "lowest"
    HIGHEST = "highest"


class EarlyStop:
    """A callback for `fit`: ends training when a metric has not improved for a while.

    All workers get the same evaluations, so that all of them stop at the same step.

    Args:
        patience: evaluations without a better value, of which the last one stops.
        metric: a name in the evaluation's metrics; `loss` is what is trained.
        goal: "lowest" or "highest".

    Attributes:
        best: the best value so far; None before the first.
        num_worse: evaluations since then.

    Raises:
        ConfigError: the patience or the goal is none of these.
    """

    def __init__(
        self, patience: int, metric: str = TOTAL, goal: Goal | str = Goal.LOWEST
    ) -> None:
        if patience < 1:
            raise ConfigError(
                f"patience={patience} would stop at the first evaluation: give the "
                "number of evaluations without a better value, 1 or more"
            )
        goals = [known.value for known in Goal]
        if not isinstance(goal, Goal) and goal not in goals:
            raise ConfigError(f"goal={goal!r} is none of {' and '.join(goals)}")
        self.best: float | None = None
        self.num_worse = 0
        self._patience = patience
        self._metric = metric
        self._goal = Goal(goal)

    def __call__(self, result: object, evaluation: EvaluationResult | None) -> bool:
        """Return whether to stop after this step.

        Raises:
            DataError: the evaluation has no such metric; names those it has.
        """
        if evaluation is None:
            return False
        value = self._value(evaluation)
        if self._is_better(value):
            self.best, self.num_worse = value, 0
        else:
            self.num_worse += 1
        return self.num_worse >= self._patience

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON."""
        return {"best": self.best, "num_worse": self.num_worse}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.best, self.num_worse = state["best"], state["num_worse"]

    def _value(self, evaluation: EvaluationResult) -> float:
        trained = {TOTAL: evaluation.loss}
        known = trained | evaluation.losses | evaluation.metrics | trained
        if self._metric not in known:
            raise DataError(
                f"training should stop by {self._metric!r}, which no evaluation "
                f"measures: there are {', '.join(map(repr, known))}"
            )
        return known[self._metric]

    def _is_better(self, value: float) -> bool:
        """Return whether a value is better than the best; NaN never is."""
        if isnan(value):
            return False
        if self.best is None:
            return True
        match self._goal:
            case Goal.LOWEST:
                return value < self.best
            case Goal.HIGHEST:
                return value > self.best
            case _:
                assert_never(self._goal)
