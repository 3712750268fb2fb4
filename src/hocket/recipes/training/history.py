"""Remembers the whole run, for the report at its end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from math import nan
from pathlib import Path
from typing import Any, Final

from hocket.recipes.training.records import EvaluationRecord, StepRecord, SummaryRecord

_NO_LOSSES: Final = {"kind", "samples_per_s", *(f.name for f in fields(StepRecord))}
_NO_METRICS: Final = {"kind", *(field.name for field in fields(EvaluationRecord))}


class History:
    """Every record of a run, in order."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.evaluations: list[EvaluationRecord] = []

    def read(self, path: Path) -> None:
        """Begin with what the run has written down before it was interrupted.

        Args:
            path: of the JSON lines that `hocket.recipes.training.metrics_log` writes.
        """
        for line in path.read_text("utf-8").splitlines():
            record = {key: _number(value) for key, value in json.loads(line).items()}
            if record["kind"] == "step":
                self.steps.append(_step(record))
            elif record["kind"] == "evaluation":
                self.evaluations.append(_evaluation(record))

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


def _number(value: Any) -> Any:
    """JSON has no NaN: what was written as null was none."""
    return nan if value is None else value


def _step(record: Mapping[str, Any]) -> StepRecord:
    named = {key: value for key, value in record.items() if key not in _NO_LOSSES}
    values = {
        field.name: record[field.name]
        for field in fields(StepRecord)
        if field.name != "losses"
    }
    return StepRecord(**values, losses={**named, "loss": record["loss"]})


def _evaluation(record: Mapping[str, Any]) -> EvaluationRecord:
    metrics = {key: value for key, value in record.items() if key not in _NO_METRICS}
    values = {
        field.name: record[field.name]
        for field in fields(EvaluationRecord)
        if field.name != "metrics"
    }
    return EvaluationRecord(**values, metrics=metrics)
