"""Results of steps, for tests of what reads them."""

from __future__ import annotations

from hocket.run.engine.sync.step_result import StepResult
from hocket.run.weights.gradient_status import PendingGradientStatus
from hocket.run.weights.gradients import GradientStatus


def step_result(step: int = 0, loss: float = 1.0) -> StepResult:
    """One that says nothing else."""
    return StepResult(
        step=step,
        loss=loss,
        losses={"loss": loss},
        num_samples=4,
        seconds=0.5,
        bubble_fraction=0.0,
        peak_bytes=0,
        gradient_status=PendingGradientStatus(step, lambda: GradientStatus(1.0)),
    )
