"""The run's numbers as files: JSON lines to read by program, TensorBoard's to look at.

    metrics.jsonl    {"kind": "step", "step": 0, ...}   one object per line
    tensorboard/     the same numbers, under train/ and evaluation/

Both are complete up to the last step at any moment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Final

from hocket.errors import RecipeError
from hocket.recipes.records import EvaluationRecord, StepRecord, SummaryRecord

JSON_NAME: Final = "metrics.jsonl"
TENSORBOARD_NAME: Final = "tensorboard"


class MetricsLog:
    """Writes every `log_every_steps`-th step, and all else, as it comes.

    Args:
        run_dir: the run's folder.
        log_every_steps: of steps.

    Raises:
        RecipeError: TensorBoard is not installed.
    """

    def __init__(self, run_dir: Path, log_every_steps: int = 1) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RecipeError(
                "runs are logged for TensorBoard, which is not installed: "
                "pip install 'hocket[recipes]'"
            ) from error
        self._every = log_every_steps
        self._lines = (run_dir / JSON_NAME).open("x", encoding="utf-8")
        self._board = SummaryWriter(run_dir / TENSORBOARD_NAME)

    def step(self, record: StepRecord) -> None:
        """Write a step's numbers."""
        if record.step % self._every:
            return
        numbers = {
            **{name: value for name, value in record.losses.items() if name != "loss"},
            "loss": record.loss,
            "samples_per_s": record.samples_per_s,
            "seconds": record.seconds,
            "bubble_fraction": record.bubble_fraction,
            "learning_rate": record.learning_rate,
            "peak_bytes": record.peak_bytes,
        }
        place = {"step": record.step, "epoch": record.epoch}
        self._write("step", place | {"num_samples": record.num_samples}, numbers)
        self._draw("train", numbers, record.step)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Write an evaluation's numbers."""
        numbers = {"loss": record.loss, **record.metrics}
        place = {"num_steps": record.num_steps, "epoch": record.epoch}
        self._write("evaluation", place | {"num_samples": record.num_samples}, numbers)
        self._draw("evaluation", numbers, record.num_steps)

    def summary(self, record: SummaryRecord) -> None:
        """Write what the run came to."""
        numbers = {
            "loss": record.evaluation.loss,
            **record.evaluation.metrics,
            "seconds": record.seconds,
            "training_s": record.training_s,
            "samples_per_s": record.samples_per_s,
            "predicted_bubble_fraction": record.predicted_bubble_fraction,
            "measured_bubble_fraction": record.measured_bubble_fraction,
            "predicted_step_s": record.predicted_step_s,
            "measured_step_s": record.measured_step_s,
        }
        place = {"num_steps": record.num_steps, "num_samples": record.num_samples}
        self._write("summary", place, numbers)

    def close(self) -> None:
        """Close the files."""
        self._lines.close()
        self._board.close()

    def _write(
        self, kind: str, place: Mapping[str, int], numbers: Mapping[str, float]
    ) -> None:
        """One line; JSON has no NaN, so a number that is none becomes null."""
        finite = {name: x if isfinite(x) else None for name, x in numbers.items()}
        self._lines.write(json.dumps({"kind": kind, **place, **finite}) + "\n")
        self._lines.flush()

    def _draw(self, group: str, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._board.add_scalar(f"{group}/{name}", value, step)
