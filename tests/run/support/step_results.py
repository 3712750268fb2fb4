"""Results of steps, for tests of what reads them."""

from __future__ import annotations

from hocket.run.device.late import Late
from hocket.run.engine.sync.step_result import StepResult, StepSeconds
from hocket.run.weights.gradients import GradientStatus


def step_result(step: int = 0, loss: float = 1.0) -> StepResult:
    """One that says nothing else."""
    return StepResult(
        step=step,
        num_samples=4,
        peak_bytes=0,
        gradient_status=Late(lambda: GradientStatus(1.0)),
        net_losses=Late(lambda: {"model": {"loss": loss}}),
        times=Late(lambda: StepSeconds(0.5, 0.5, 1.0)),
    )
