"""What one step of training came to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step came to. Every worker gets the same losses.

    Args:
        step: numbered from 0 over the life of the pipeline.
        loss: what is trained, the mean over all samples of the step.
        losses: every scalar that the loss function names, likewise.
        num_samples: of all its batches, over all replicas.
        grad_norm: of all gradients together, before they were clipped.
        skipped: no weight was updated, because gradients of float16 were too large.
        seconds: the step took on this worker.
        bubble_fraction: the share of them in which this worker's lane did not work.
        peak_bytes: the most memory that this worker has held so far (on the GPU, or
            the process's resident set on a CPU).
    """

    step: int
    loss: float
    losses: dict[str, float]
    num_samples: int
    grad_norm: float
    skipped: bool
    seconds: float
    bubble_fraction: float
    peak_bytes: int
