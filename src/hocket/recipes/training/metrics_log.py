"""Writes a run's numbers: JSON lines for programs, and loggers for people.

    metrics.jsonl    {"kind": "step", "step": 0, ...}   one object per line
    tensorboard/     the same numbers, under train/, evaluation/ and epoch/
    run.loggers      the same

The lines are complete up to the last step at any moment. A run that resumes from a
checkpoint first removes what was written after it, so that no step occurs twice.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from math import isfinite, nan
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

from hocket.core.layout import WorkerLayout
from hocket.errors import MissingPackageError, RecipeError
from hocket.recipes.config.recipe import RunSettings
from hocket.recipes.run_files import METRICS_NAME
from hocket.recipes.training.records import (
    EpochRecord,
    EvaluationRecord,
    StepRecord,
    SummaryRecord,
    Watcher,
)
from hocket.recipes.user_functions import load_function

JSON_NAME: Final = METRICS_NAME
TENSORBOARD_NAME: Final = "tensorboard"
# Not logged: they say where, and loggers take numbers.
_PLACES: Final = ("step", "epoch", "num_steps", "num_samples")
_STRUCTURES: Final = ("losses", "metrics", "evaluation")  # of which numbers are written
_FLUSH_S: Final = 10  # seconds between flushes
_RATES: Final = ("samples_per_s", "message_bytes_per_s")  # that some records compute


class Logger(Protocol):
    """Receives numbers, on rank 0; `wandb.init(...)` returns one."""

    def log(self, numbers: dict[str, Any], /, *, step: int) -> object:
        """Log numbers.

        Args:
            numbers: by names such as `train/loss` or `evaluation/accuracy`.
            step: the step's number; of an evaluation, the steps trained before it.
        """


class TensorBoardLogger:
    """Writes TensorBoard's events, once there are numbers; close it at the end.

    Args:
        folder: where events go; made with the first numbers, so on rank 0 alone.
        first_step: the step at which a run resumes that has logged there before:
            what it logged from that step on is hidden.

    Raises:
        MissingPackageError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path, *, first_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingPackageError(
                "run.loggers names TensorBoard, which is not installed: "
                "pip install 'hocket[recipes]'"
            ) from error
        self._make = SummaryWriter
        self._folder, self._first_step = Path(folder).absolute(), first_step
        self._board: SummaryWriter | None = None

    def log(self, numbers: Mapping[str, float], /, *, step: int) -> None:
        """Write each number as a scalar."""
        if self._board is None:
            self._board = self._make(
                str(self._folder), purge_step=self._first_step, flush_secs=_FLUSH_S
            )
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self._board is not None:
            self._board.close()


def _json_line(values: Mapping[str, Any]) -> str:
    """Return one line of JSON; NaN and infinities become null."""
    finite = {
        name: None if isinstance(x, float) and not isfinite(x) else x
        for name, x in values.items()
    }
    return json.dumps(finite) + "\n"


class MetricsLog(Watcher):
    """Writes every `log_every_steps`-th step, every evaluation and the summary.

    Args:
        run_dir: the run's folder.
        log_every_steps: the steps between two that are written.
        first_step: the step at which a run resumes in its own folder; None for a run
            with a new one.
    """

    def __init__(
        self, run_dir: Path, log_every_steps: int = 1, *, first_step: int | None = None
    ) -> None:
        self._every = log_every_steps
        path = run_dir / JSON_NAME
        if first_step is not None and path.exists():
            _truncate(path, first_step)
        mode = "x" if first_step is None else "a"
        self._lines = path.open(mode, encoding="utf-8")

    def step(self, record: StepRecord) -> None:
        """Write a step's numbers."""
        if record.step % self._every == 0:
            self._write("step", _flat(record, record.losses))

    def evaluation(self, record: EvaluationRecord) -> None:
        """Write an evaluation's numbers."""
        self._write("evaluation", _flat(record, record.metrics))

    def epoch(self, record: EpochRecord) -> None:
        """Write an epoch's numbers."""
        self._write("epoch", _flat(record))

    def summary(self, record: SummaryRecord) -> None:
        """Write the run's totals, and the last evaluation's loss and metrics."""
        last = record.evaluation
        self._write("summary", _flat(record, {"loss": last.loss, **last.metrics}))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def _write(self, kind: str, numbers: Mapping[str, Any]) -> None:
        self._lines.write(_json_line({"kind": kind, **numbers}))
        self._lines.flush()


class LoggerWatcher(Watcher):
    """Passes the same numbers on to a logger.

    Args:
        logger: the logger; closed at the end if it has a method `close`.
        log_every_steps: the steps between two that are logged.
    """

    def __init__(self, logger: Logger, log_every_steps: int = 1) -> None:
        self._logger = logger
        self._every = log_every_steps

    def step(self, record: StepRecord) -> None:
        """Log a step's numbers."""
        if record.step % self._every == 0:
            self._log("train", _flat(record, record.losses), record.step)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Log an evaluation's numbers."""
        self._log("evaluation", _flat(record, record.metrics), record.num_steps)

    def epoch(self, record: EpochRecord) -> None:
        """Log an epoch's numbers."""
        numbers = _flat(record)
        layout = WorkerLayout.parse(numbers.pop("layout"))
        shape = {"num_stages": layout.num_devices, "num_replicas": layout.num_replicas}
        self._log("epoch", numbers | shape, record.num_steps)

    def close(self) -> None:
        """Close the logger."""
        if callable(close := getattr(self._logger, "close", None)):
            close()

    def _log(self, group: str, numbers: Mapping[str, Any], step: int) -> None:
        drawn = {
            f"{group}/{name}": x for name, x in numbers.items() if name not in _PLACES
        }
        self._logger.log(drawn, step=step)


def file_watchers(
    settings: RunSettings, run_dir: Path, first_step: int | None
) -> Iterator[Watcher]:
    """Yield the watchers that write into a run's folder.

    Args:
        settings: which steps, and by which loggers.
        run_dir: the run's folder.
        first_step: the step at which a run resumes in its own folder; None for a run
            with a new one.
    """
    every = settings.log_every_steps
    yield MetricsLog(run_dir, every, first_step=first_step)
    for name in settings.loggers:
        yield LoggerWatcher(make_logger(name, run_dir, first_step), every)


def make_logger(name: str, run_dir: Path, first_step: int | None) -> Logger:
    """Make a logger that a recipe names.

    Args:
        name: "tensorboard", or a `module:function` that is called with the folder.
        run_dir: the run's folder.
        first_step: the step at which a run resumes in its own folder.

    Raises:
        MissingPackageError: TensorBoard is not installed.
        RecipeError: what the function returned has no method `log`.
    """
    if name == TENSORBOARD_NAME:
        return TensorBoardLogger(run_dir / TENSORBOARD_NAME, first_step=first_step)
    logger: Logger = load_function(name)(run_dir)
    if not callable(getattr(logger, "log", None)):
        raise RecipeError(
            f"{name} returned {type(logger).__name__} without log: a logger has "
            "log(numbers, step=step), as a run of W&B has"
        )
    return logger


def _flat(
    record: StepRecord | EvaluationRecord | EpochRecord | SummaryRecord,
    named: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return a record's numbers, with those that the user names beside the others."""
    names = [field.name for field in dataclasses.fields(record)]
    names += [name for name in _RATES if hasattr(record, name)]
    plain = {name: getattr(record, name) for name in names if name not in _STRUCTURES}
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


class History(Watcher):
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
