"""Passes the numbers of steps on to loggers, on rank 0.

    StepResult  ─▶ {"train/loss": 0.7, ...}  ─▶ log(numbers, step=step)

Anything with such a `log` is a logger: a run of W&B as it is, the two classes here, or
one of your own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Final, Protocol, TextIO

from hocket.errors import CallbackError, MissingPackageError
from hocket.run.cluster.world import World
from hocket.run.data.loss import TOTAL
from hocket.run.engine.sync.step_result import StepResult

log = logging.getLogger(__name__)
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


class LoggerCalls:
    """Calls loggers on rank 0; all workers raise their errors together.

    On several workers, one that left alone would let the others wait. A worker alone
    raises at once.

    Args:
        loggers: the loggers; None, on every worker, if there are none.
        world: the job.
        overlaps: whether steps overlap.
    """

    def __init__(
        self, loggers: Sequence[Logger] | None, world: World, *, overlaps: bool
    ) -> None:
        self._loggers = [] if world.rank else list(loggers or ())
        self._is_watched = loggers is not None  # also where only rank 0 has some
        self._world = world
        self._overlaps = overlaps
        self._failures: list[str] = []
        self._error: Exception | None = None  # the first one

    def log(self, result: StepResult) -> None:
        """Log a step's numbers; one that fails is logged, and not called again.

        Raises:
            CallbackError: one failed, and there is no other worker.
        """
        for logger in [*self._loggers]:
            numbers = numbers_of(result, overlaps=self._overlaps)
            try:
                logger.log(numbers, step=result.step)
            except Exception as error:
                name = f"{type(logger).__qualname__}.log failed after step"
                what = f"{name} {result.step}: {type(error).__name__}: {error}"
                self._failures.append(what)
                self._error = self._error or error
                self._loggers = [x for x in self._loggers if x is not logger]
                if self._world.world_size == 1:
                    self.raise_failures()
                log.exception("%s; training goes on without it", what)

    def raise_failures(self) -> None:
        """Raise what failed on rank 0; every worker must call this.

        Raises:
            CallbackError: a logger failed.
        """
        if not self._is_watched:
            return
        by_rank = self._world.gather_json(self._failures, "failures of loggers")
        failures = [f"rank {r}: {x}" for r, own in enumerate(by_rank) for x in own]
        self._failures = []
        if failures:
            raise CallbackError(
                f"{'; '.join(failures)}. The pipeline can be used as before"
            ) from self._error


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
    for name, loss in result.losses.items():
        if name != TOTAL:
            numbers[f"losses/{name}" if name in taken else name] = loss
    return {f"train/{name}": value for name, value in numbers.items()}
