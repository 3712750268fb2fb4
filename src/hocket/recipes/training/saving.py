"""How far a run has come: what it counts, reports, saves, and resumes from.

    runs/mine/checkpoints/      written and read by hocket.run.checkpoint

Beside the pipeline's state, each holds the run's own: the position in the data, the
state of early stopping, and the totals so far. So a run that resumes ends with the
numbers of one that was never interrupted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isnan
from pathlib import Path
from time import monotonic
from typing import Any

from hocket.errors import DataError
from hocket.recipes.config.sections import TrainingSettings
from hocket.recipes.run_files import CHECKPOINTS_NAME
from hocket.recipes.training.records import (
    EvaluationRecord,
    StepRecord,
    SummaryRecord,
    Watchers,
)
from hocket.recipes.training.task import Task
from hocket.recipes.training.watchers import recipe_watchers
from hocket.run.data.loss import TOTAL
from hocket.run.data.metrics import EvaluationResult


@dataclass
class Totals:
    """The totals of a run so far, including those before interruptions.

    Args:
        num_steps: the steps trained.
        num_samples: the samples trained on, counted once per epoch.
        training_s: the seconds of the steps.
        seconds: the seconds since the first step, without interruptions.
        num_skipped: the steps that updated nothing (float16).
        peak_bytes: rank 0's peak memory.
    """

    num_steps: int = 0
    num_samples: int = 0
    training_s: float = 0.0
    seconds: float = 0.0
    num_skipped: int = 0
    peak_bytes: int = 0


@dataclass
class EarlyStop:
    """How evaluations have improved so far, which decides when training stops.

    Args:
        best: the best value so far; None before the first.
        num_worse: evaluations since then.
    """

    best: float | None = None
    num_worse: int = 0

    def stops_after(
        self, evaluation: EvaluationResult, training: TrainingSettings
    ) -> bool:
        """Return whether to stop; a value that is no number is never better.

        Raises:
            DataError: the evaluation has no such metric; names those it has.
        """
        if training.stop_patience is None:
            return False
        total, name = {TOTAL: evaluation.loss}, training.stop_metric
        known = total | evaluation.losses | evaluation.metrics | total
        if name not in known:
            raise DataError(
                f"training should stop by {name!r}, which no evaluation measures: "
                f"there are {', '.join(map(repr, known))}"
            )
        value, sign = known[name], -1.0 if training.stop_goal == "highest" else 1.0
        is_better = self.best is None or sign * value < sign * self.best
        if is_better and not isnan(value):
            self.best, self.num_worse = value, 0
        else:
            self.num_worse += 1
        return self.num_worse >= training.stop_patience


class RecipeRun:
    """How far a run of a recipe has come, and what it reports on its way.

    Args:
        task: what is trained.
        run_dir: the run's folder.

    Attributes:
        checkpoints_dir: the folder of the run's checkpoints.
        loader: the batches that are left.
        early_stop: how evaluations have improved.
        totals: the totals so far, including those before a resume.
        watchers: called with every record; empty on all ranks but 0.
        last: the last evaluation.
    """

    def __init__(self, task: Task, run_dir: Path) -> None:
        self.task, self.run_dir = task, run_dir
        self.recipe, self.checkpoints_dir = task.recipe, run_dir / CHECKPOINTS_NAME
        self.loader = task.loader()
        self.early_stop, self.totals = EarlyStop(), Totals()
        self.watchers = Watchers()
        self.last: EvaluationRecord | None = None
        self._begin_s = monotonic()

    def load_state_dict(self, data: dict[str, Any]) -> None:
        """Resume from a checkpoint.

        Raises:
            DataError: the data, or their order, are not the same.
        """
        self.loader.load_state_dict(data["loader"])
        self.early_stop = EarlyStop(**(data["stop"] or {}))
        self.totals = Totals(**data["totals"])

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside weights and optimizers, as JSON."""
        self.totals.seconds = monotonic() - self._begin_s
        return {
            "loader": self.loader.state_dict(),
            "stop": asdict(self.early_stop),
            "totals": asdict(self.totals),
        }

    def start_clock(self) -> None:
        """Let the time begin, or go on after an interruption."""
        self._begin_s = monotonic() - self.totals.seconds

    def watch(self, *, goes_on: bool) -> None:
        """Open the log and the loggers, and make the callbacks.

        Args:
            goes_on: whether the run's folder may hold what this run has written itself,
                before it broke off.
        """
        first_step = self.totals.num_steps if goes_on else None
        for watcher in recipe_watchers(self.recipe.run, self.run_dir, first_step):
            self.watchers.append(watcher)

    def saves_after(self, step: int, *, stops: bool) -> bool:
        """Return whether a checkpoint follows a step, which may be the last one."""
        return self.task.saves_after(step) or (stops and self.recipe.checkpoint.final)

    def report_step(
        self,
        step: int,
        *,
        num_samples: int,
        seconds: float,
        is_skipped: bool,
        **more: Any,
    ) -> None:
        """Count and report a step.

        Args:
            step: its number, from 0.
            num_samples: the batch's samples.
            seconds: the step's seconds.
            is_skipped: whether it has updated nothing (float16).
            **more: the other fields of its record.
        """
        totals = self.totals
        totals.num_steps = step + 1
        totals.training_s += seconds
        totals.num_samples += num_samples
        record = StepRecord(
            step=step,
            epoch=self.task.epoch(step),
            num_samples=num_samples,
            seconds=seconds,
            learning_rate=self.task.learning_rate(step - totals.num_skipped),
            **more,
        )
        totals.num_skipped += is_skipped
        totals.peak_bytes = max(totals.peak_bytes, record.peak_bytes)
        self.watchers.report(record)

    def report_evaluation(self, result: EvaluationResult) -> None:
        """Report an evaluation after the steps so far."""
        num_steps = self.totals.num_steps
        epoch = self.task.epoch(num_steps - 1)
        self.last = EvaluationRecord(
            num_steps, epoch, result.loss, result.metrics, result.num_samples
        )
        self.watchers.report(self.last)

    def report_summary(self, **steps: Any) -> SummaryRecord:
        """Report the end of the run.

        Args:
            **steps: what is predicted and measured of its steps.
        """
        assert self.last is not None, "training ends with an evaluation"
        record = SummaryRecord(
            num_steps=self.totals.num_steps,
            num_samples=self.totals.num_samples,
            seconds=monotonic() - self._begin_s,
            training_s=self.totals.training_s,
            evaluation=self.last,
            peak_bytes=self.totals.peak_bytes,
            **steps,
        )
        self.watchers.report(record)
        return record
