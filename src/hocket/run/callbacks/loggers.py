"""Passes the numbers of steps and evaluations on to loggers, on rank 0.

    StepResult         ─▶ {"train/loss": 0.7, ...}       ─┐
                                                          ├─▶ log(numbers, step=step)
    EvaluationResult   ─▶ {"evaluation/loss": 0.6, ...}  ─┘

Anything with such a `log` is a logger: a run of W&B as it is, the two classes here, or
one of your own.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Final, Protocol, TextIO

from hocket.errors import MissingPackageError
from hocket.run.callbacks.callbacks import Callback
from hocket.run.cluster.world import World
from hocket.run.data.loss import TOTAL
from hocket.run.data.metrics import EvaluationResult
from hocket.run.engine.sync.step_result import StepResult

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
                "TensorBoardLogger needs TensorBoard, which is not installed: "
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


class JsonLinesLogger:
    """Writes a JSON object per line, appended to the file; close it at the end.

    Args:
        path: the file; made with the first numbers, and its folder, too.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path).absolute()
        self._lines: TextIO | None = None

    def log(self, numbers: Mapping[str, float], /, *, step: int) -> None:
        """Write `{"step": 3, "train/loss": 0.7, ...}`."""
        if self._lines is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lines = self._path.open("a", encoding="utf-8")
        self._lines.write(json_line({"step": step, **numbers}))
        self._lines.flush()

    def close(self) -> None:
        """Close the file."""
        if self._lines is not None:
            self._lines.close()


def json_line(values: Mapping[str, Any]) -> str:
    """Return one line of JSON; NaN and infinities become null."""
    finite = {
        name: None if isinstance(x, float) and not isfinite(x) else x
        for name, x in values.items()
    }
    return json.dumps(finite) + "\n"


def log_callbacks(
    loggers: Sequence[Logger] | None, world: World, *, overlaps: bool
) -> list[Callback]:
    """Return a callback for each logger, on rank 0.

    Args:
        loggers: the loggers; None if there are none.
        world: the job.
        overlaps: whether steps overlap.
    """
    if world.rank:
        return []
    return [_LogNumbers(logger, overlaps=overlaps) for logger in loggers or ()]


class _LogNumbers:
    """Logs a step's numbers, and those of the evaluation that follows it."""

    def __init__(self, logger: Logger, *, overlaps: bool) -> None:
        self._logger = logger
        self._overlaps = overlaps
        self.__qualname__ = f"{type(logger).__qualname__}.log"  # in errors

    def __call__(self, result: StepResult, evaluation: EvaluationResult | None) -> None:
        """Log the step at `step`, the evaluation at `step + 1`."""
        numbers = numbers_of(result, overlaps=self._overlaps)
        self._logger.log(numbers, step=result.step)
        if evaluation is not None:
            self._logger.log(numbers_of_evaluation(evaluation), step=result.step + 1)


def numbers_of(result: StepResult, *, overlaps: bool) -> dict[str, float]:
    """Return the numbers of a step by their names.

    A named loss with the name of another number is called `train/losses/NAME`.

    Args:
        result: the step's.
        overlaps: whether steps overlap: then the norm of gradients is left out, since
            to ask for it is to wait for all workers.
    """
    numbers = {
        "loss": result.loss,
        "seconds": result.seconds,
        "samples_per_s": result.num_samples / result.seconds,
        "bubble_fraction": result.bubble_fraction,
        "peak_bytes": result.peak_bytes,
    }
    taken = {*numbers, "grad_norm"}  # whether or not this step has one
    if not overlaps and not result.gradient_status.status.unknown:
        numbers["grad_norm"] = result.grad_norm
    named = {name: x for name, x in result.losses.items() if name != TOTAL}
    numbers |= _with_prefix("losses", named, taken)
    return {f"train/{name}": value for name, value in numbers.items()}


def numbers_of_evaluation(evaluation: EvaluationResult) -> dict[str, float]:
    """Return the numbers of an evaluation by their names.

    A metric with the name of a loss is called `evaluation/metrics/NAME`.
    """
    losses = {**evaluation.losses, TOTAL: evaluation.loss}
    numbers = losses | _with_prefix("metrics", evaluation.metrics, losses)
    return {f"evaluation/{name}": value for name, value in numbers.items()}


def _with_prefix(
    prefix: str, named: Mapping[str, float], taken: Container[str]
) -> dict[str, float]:
    """Put a prefix before the names that are taken."""
    return {f"{prefix}/{x}" if x in taken else x: named[x] for x in named}
