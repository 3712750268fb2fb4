"""Remembers the whole run, for the report at its end."""

from __future__ import annotations

from hocket.recipes.records import EvaluationRecord, StepRecord, SummaryRecord


class History:
    """Every record of a run, in order."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.evaluations: list[EvaluationRecord] = []

    def step(self, record: StepRecord) -> None:
        """One more step."""
        self.steps.append(record)

    def evaluation(self, record: EvaluationRecord) -> None:
        """One more evaluation."""
        self.evaluations.append(record)

    def summary(self, record: SummaryRecord) -> None:
        """The report takes it from whoever made it."""

    def close(self) -> None:
        """Nothing is held."""
