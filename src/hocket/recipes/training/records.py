"""What a run writes down of each step and each evaluation, and whoever reads along."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hocket.errors import RecipeError
from hocket.recipes.config.user_functions import load_function


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of training.

    Args:
        step: from 0.
        epoch: from 0.
        loss: what is trained, over the whole batch.
        losses: every scalar that the loss function names.
        num_samples: of the batch.
        seconds: that the step took.
        bubble_fraction: the share of them in which the main worker did not work.
        learning_rate: of the step's update.
        grad_norm: of all gradients together, before they were clipped.
        peak_bytes: the most memory that the main worker has held so far.
    """

    step: int
    epoch: int
    loss: float
    losses: Mapping[str, float]
    num_samples: int
    seconds: float
    bubble_fraction: float
    learning_rate: float
    grad_norm: float
    peak_bytes: int

    @property
    def samples_per_s(self) -> float:
        """The speed of this step."""
        return self.num_samples / self.seconds


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """One evaluation, after as many steps of training.

    Args:
        num_steps: trained before it.
        epoch: in which the last of them was.
        loss: over all samples.
        metrics: what else is measured, first what the task is about.
        num_samples: that these are means of.
    """

    num_steps: int
    epoch: int
    loss: float
    metrics: Mapping[str, float]
    num_samples: int


@dataclass(frozen=True, slots=True)
class SummaryRecord:
    """What a whole run came to, over all its interruptions.

    Args:
        num_steps: of training.
        num_samples: trained on, each as often as it was.
        seconds: from the first step to the last evaluation.
        training_s: of these, the steps' alone.
        evaluation: the last one.
        predicted_bubble_fraction: of one step, over all lanes; where steps overlap,
            while the pipeline is full.
        measured_bubble_fraction: likewise, of a typical step; None where none was
            measured.
        predicted_step_s: of one step; where steps overlap, of one among others.
        measured_step_s: likewise, if any was measured.
    """

    num_steps: int
    num_samples: int
    seconds: float
    training_s: float
    evaluation: EvaluationRecord
    predicted_bubble_fraction: float
    measured_bubble_fraction: float | None
    predicted_step_s: float
    measured_step_s: float | None

    @property
    def samples_per_s(self) -> float:
        """The speed of training."""
        return self.num_samples / self.training_s


class Watcher(Protocol):
    """Somebody whom the main worker tells what happens."""

    def step(self, record: StepRecord) -> None:
        """A step has ended."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """An evaluation has ended."""

    def summary(self, record: SummaryRecord) -> None:
        """The run has ended."""

    def close(self) -> None:
        """Nothing more will come, whether the run ended well or not."""


def own_watcher(name: str, run_dir: Path) -> Watcher:
    """Call a function of the user's that returns a watcher.

    Args:
        name: `module:function`, called with the run's folder.
        run_dir: that folder.

    Raises:
        RecipeError: what it returns lacks a method of `Watcher`.
    """
    watcher: Watcher = load_function(name)(run_dir)
    missing = [
        method
        for method in ("step", "evaluation", "summary", "close")
        if not callable(getattr(watcher, method, None))
    ]
    if missing:
        raise RecipeError(
            f"{name} returned {type(watcher).__name__} without {', '.join(missing)}: a "
            "callback needs the methods of hocket.recipes.training.records.Watcher"
        )
    return watcher
