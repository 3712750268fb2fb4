"""Writes a run's numbers: JSON lines for programs, TensorBoard's events for people.

    metrics.jsonl    {"kind": "step", "step": 0, ...}   one object per line
    tensorboard/     the same numbers, under train/ and evaluation/

Both are complete up to the last step at any moment. A run that resumes from a
checkpoint first removes what was written after it, so that no step occurs twice.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from math import isfinite, nan
from pathlib import Path
from typing import Any, Final

from hocket.core.layout import WorkerLayout
from hocket.errors import MissingPackageError
from hocket.recipes.run_files import METRICS_NAME
from hocket.recipes.training.records import (
    EpochRecord,
    EvaluationRecord,
    StepRecord,
    SummaryRecord,
)

JSON_NAME: Final = METRICS_NAME
TENSORBOARD_NAME: Final = "tensorboard"
_PLACES: Final = ("step", "epoch", "num_steps", "num_samples")  # not drawn
_STRUCTURES: Final = ("losses", "metrics", "evaluation")  # of which numbers are written


class MetricsLog:
    """Writes every `log_every_steps`-th step, every evaluation and the summary.

    Args:
        run_dir: the run's folder.
        log_every_steps: the steps between two that are written.
        first_step: the step at which a run resumes in its own folder; None for a run
            with a new one.

    Raises:
        MissingPackageError: TensorBoard is not installed.
    """

    def __init__(
        self, run_dir: Path, log_every_steps: int = 1, *, first_step: int | None = None
    ) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingPackageError(
                "runs are logged for TensorBoard, which is not installed: "
                "pip install 'hocket[recipes]'"
            ) from error
        self._every = log_every_steps
        path = run_dir / JSON_NAME
        if first_step is not None and path.exists():
            _truncate(path, first_step)
        mode = "x" if first_step is None else "a"
        self._lines = path.open(mode, encoding="utf-8")
        self._board = SummaryWriter(run_dir / TENSORBOARD_NAME, purge_step=first_step)

    def step(self, record: StepRecord) -> None:
        """Write a step's numbers."""
        if record.step % self._every:
            return
        self._write("step", _flat(record, record.losses))
        self._draw("train", _flat(record, record.losses), record.step)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Write an evaluation's numbers."""
        self._write("evaluation", _flat(record, record.metrics))
        self._draw("evaluation", _flat(record, record.metrics), record.num_steps)

    def epoch(self, record: EpochRecord) -> None:
        """Write an epoch's numbers."""
        numbers = {
            **dataclasses.asdict(record),
            "samples_per_s": record.samples_per_s,
            "message_bytes_per_s": record.message_bytes_per_s,
        }
        self._write("epoch", numbers)
        layout = WorkerLayout.parse(numbers.pop("layout"))
        shape = {"num_stages": layout.num_devices, "num_replicas": layout.num_replicas}
        self._draw("epoch", numbers | shape, record.num_steps)

    def summary(self, record: SummaryRecord) -> None:
        """Write the run's totals, and the last evaluation's loss and metrics."""
        last = record.evaluation
        self._write("summary", _flat(record, {"loss": last.loss, **last.metrics}))

    def close(self) -> None:
        """Close the files."""
        self._lines.close()
        self._board.close()

    def _write(self, kind: str, numbers: Mapping[str, Any]) -> None:
        """Write one line; JSON has no NaN, so that null replaces it."""
        finite = {
            name: None if isinstance(x, float) and not isfinite(x) else x
            for name, x in numbers.items()
        }
        self._lines.write(json.dumps({"kind": kind, **finite}) + "\n")
        self._lines.flush()

    def _draw(self, group: str, numbers: Mapping[str, Any], step: int) -> None:
        for name, value in numbers.items():
            if name not in _PLACES:
                self._board.add_scalar(f"{group}/{name}", value, step)


def _flat(
    record: StepRecord | EvaluationRecord | SummaryRecord, named: Mapping[str, float]
) -> dict[str, Any]:
    """Return a record's numbers, with those that the user names beside the others."""
    numbers = {
        field.name: getattr(record, field.name) for field in dataclasses.fields(record)
    }
    if not isinstance(record, EvaluationRecord):
        numbers["samples_per_s"] = record.samples_per_s
    plain = {name: x for name, x in numbers.items() if name not in _STRUCTURES}
    return {**named, **plain}


def _truncate(path: Path, first_step: int) -> None:
    """Replace the file by one with only what was written before a step."""
    kept = path.with_suffix(".kept")
    kept.write_text("".join(_before(path, first_step)), encoding="utf-8")
    kept.replace(path)


def _before(path: Path, first_step: int) -> Iterator[str]:
    """Yield the lines of steps before `first_step`, and of evaluations after these."""
    for line in path.read_text("utf-8").splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:  # the last line of a run that was killed
            return
        place = record["step"] + 1 if record["kind"] == "step" else record["num_steps"]
        if record["kind"] != "summary" and place <= first_step:
            yield line


class History:
    """Keeps every record of a run, for the report at its end."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.evaluations: list[EvaluationRecord] = []
        self.epochs: list[EpochRecord] = []

    def read(self, path: Path) -> None:
        """Read the records from before an interruption.

        Args:
            path: the JSON lines that `MetricsLog` has written.
        """
        for line in path.read_text("utf-8").splitlines():
            record = {key: _number(value) for key, value in json.loads(line).items()}
            if record["kind"] == "step":
                self.steps.append(_step(record))
            elif record["kind"] == "evaluation":
                self.evaluations.append(_evaluation(record))
            elif record["kind"] == "epoch":
                self.epochs.append(EpochRecord(**_parted(record, EpochRecord)[0]))

    def step(self, record: StepRecord) -> None:
        """Keep a step's record."""
        self.steps.append(record)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Keep an evaluation's record."""
        self.evaluations.append(record)

    def epoch(self, record: EpochRecord) -> None:
        """Keep an epoch's record."""
        self.epochs.append(record)

    def summary(self, record: SummaryRecord) -> None:
        """Do nothing: `write_report` gets the summary itself."""

    def close(self) -> None:
        """Do nothing."""


def _number(value: Any) -> Any:
    """Return NaN for null, as which it was written."""
    return nan if value is None else value


def _step(record: Mapping[str, Any]) -> StepRecord:
    fields, named = _parted(record, StepRecord)
    del named["samples_per_s"]
    return StepRecord(**fields, losses={**named, "loss": record["loss"]})


def _evaluation(record: Mapping[str, Any]) -> EvaluationRecord:
    fields, named = _parted(record, EvaluationRecord)
    return EvaluationRecord(**fields, metrics=named)


def _parted(
    record: Mapping[str, Any], kind: type[StepRecord | EvaluationRecord | EpochRecord]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide a line's numbers into a record's fields and those that the user names."""
    own = {field.name for field in dataclasses.fields(kind)}
    return (
        {name: value for name, value in record.items() if name in own},
        {name: x for name, x in record.items() if name not in own | {"kind"}},
    )
