"""Writes a run's numbers: JSON lines for programs, and loggers for people.

    metrics.jsonl    {"kind": "step", "step": 0, ...}   one object per line
    tensorboard/     the same numbers, under train/, evaluation/ and epoch/
    run.loggers      the same

The lines are complete up to the last step at any moment. A run that resumes from a
checkpoint first removes what was written after it, so that no step occurs twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Final, Protocol

from hocket.core.layout import WorkerLayout
from hocket.errors import MissingPackageError, RecipeError
from hocket.recipes.config.recipe import RunSettings
from hocket.recipes.run_files import METRICS_NAME, read_metrics
from hocket.recipes.training.records import (
    EpochRecord,
    EvaluationRecord,
    Record,
    StepRecord,
    Watcher,
    numbers_of,
)
from hocket.recipes.user_functions import load_function

TENSORBOARD_NAME: Final = "tensorboard"
# Not logged: they say where, and loggers take numbers.
_PLACES: Final = ("step", "epoch", "num_steps", "num_samples", "layout")
_FLUSH_S: Final = 10  # seconds between flushes


class Logger(Protocol):
    """Receives numbers, on rank 0; `wandb.init(...)` returns one."""

    def log(self, numbers: dict[str, Any], /, *, step: int) -> object:
        """Log numbers.

        Args:
            numbers: by names such as `train/loss` or `evaluation/accuracy`.
            step: the step's number; of an evaluation, the steps trained before it.
        """


class TensorBoardLogger:
    """Writes TensorBoard's events; close it at the end.

    Args:
        folder: where events go.
        first_step: the step at which a run resumes that has logged there before:
            what it logged from that step on is hidden.

    Raises:
        MissingPackageError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path, first_step: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingPackageError(
                "run.loggers names TensorBoard, which is not installed: "
                "pip install 'hocket[recipes]'"
            ) from error
        self._board = SummaryWriter(
            str(folder.absolute()), purge_step=first_step, flush_secs=_FLUSH_S
        )
        self.close = self._board.close

    def log(self, numbers: Mapping[str, float], /, *, step: int) -> None:
        """Write each number as a scalar."""
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)


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
        path = run_dir / METRICS_NAME
        if first_step is not None and path.exists():
            _truncate(path, first_step)
        mode = "x" if first_step is None else "a"
        self._lines = path.open(mode, encoding="utf-8")

    def step(self, record: StepRecord) -> None:
        """Write a step's numbers."""
        if record.step % self._every == 0:
            self._write(record)

    def _write(self, record: Record) -> None:
        """Write a record's numbers."""
        self._lines.write(_json_line({"kind": record.kind, **numbers_of(record)}))
        self._lines.flush()

    evaluation = epoch = summary = _write

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def _json_line(values: Mapping[str, Any]) -> str:
    """Return one line of JSON; NaN and infinities become null."""
    finite = {
        name: None if isinstance(x, float) and not isfinite(x) else x
        for name, x in values.items()
    }
    return json.dumps(finite) + "\n"


def _truncate(path: Path, first_step: int) -> None:
    """Replace the file by one with only what was written before a step."""

    def is_before(line: Mapping[str, Any]) -> bool:
        place: int = line["step"] + 1 if line["kind"] == "step" else line["num_steps"]
        return line["kind"] != "summary" and place <= first_step

    kept = path.with_suffix(".kept")
    lines = map(_json_line, filter(is_before, read_metrics(path)))
    kept.write_text("".join(lines), encoding="utf-8")
    kept.replace(path)


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
            self._log("train", numbers_of(record), record.step)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Log an evaluation's numbers."""
        self._log("evaluation", numbers_of(record), record.num_steps)

    def epoch(self, record: EpochRecord) -> None:
        """Log an epoch's numbers."""
        layout = WorkerLayout.parse(record.layout)
        shape = {"num_stages": layout.num_devices, "num_replicas": layout.num_replicas}
        self._log("epoch", numbers_of(record) | shape, record.num_steps)

    def close(self) -> None:
        """Close the logger."""
        if callable(close := getattr(self._logger, "close", None)):
            close()

    def _log(self, group: str, numbers: Mapping[str, Any], step: int) -> None:
        drawn = {
            f"{group}/{name}": x for name, x in numbers.items() if name not in _PLACES
        }
        self._logger.log(drawn, step=step)


def recipe_watchers(
    settings: RunSettings, run_dir: Path, first_step: int | None
) -> Iterator[Watcher]:
    """Yield what a recipe wants called: the log, its loggers and its callbacks.

    Args:
        settings: which steps, by which loggers and callbacks.
        run_dir: the run's folder.
        first_step: the step at which a run resumes in its own folder; None for a run
            with a new one.

    Raises:
        MissingPackageError: TensorBoard is not installed.
        RecipeError: a function of the user's has returned no logger, or no watcher.
    """
    every = settings.log_every_steps
    yield MetricsLog(run_dir, every, first_step=first_step)
    for name in settings.loggers:
        yield LoggerWatcher(make_logger(name, run_dir, first_step), every)
    for name in settings.callbacks:
        methods = ("step", "evaluation", "summary", "close")
        yield _made(name, run_dir, methods, "a callback has the methods of Watcher")


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
        return TensorBoardLogger(run_dir / TENSORBOARD_NAME, first_step)
    needs = "a logger has log(numbers, step=step), as a run of W&B has"
    logger: Logger = _made(name, run_dir, ("log",), needs)
    return logger


def _made(name: str, run_dir: Path, methods: tuple[str, ...], needs: str) -> Any:
    """Return what the user's function makes with a run's folder.

    Raises:
        RecipeError: it lacks a method.
    """
    made = load_function(name)(run_dir)
    missing = [x for x in methods if not callable(getattr(made, x, None))]
    if missing:
        raise RecipeError(
            f"{name} returned {type(made).__name__} without {', '.join(missing)}: "
            f"{needs}"
        )
    return made
