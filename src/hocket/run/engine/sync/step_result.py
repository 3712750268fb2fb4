"""What one step of training came to."""

from __future__ import annotations

from dataclasses import dataclass, field

from hocket.core.timelines.idle import idle_by_cause
from hocket.core.timelines.timeline import Timeline
from hocket.errors import WaitError
from hocket.run.weights.gradient_status import PendingGradientStatus


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step came to. Every worker gets the same losses.

    Args:
        step: numbered from 0 over the life of the pipeline.
        loss: what is trained, the mean over all samples of the step.
        losses: every scalar that the loss function names, the mean over all samples.
            Those of one name in several nets are added up.
        num_samples: the samples of all its batches, over all replicas.
        seconds: the step took on this worker.
        bubble_fraction: the share of them in which this worker's lane did not work.
        peak_bytes: the most memory that this worker has held so far (on the GPU, or
            the process's resident set on a CPU).
        gradient_status: what its gradients were.
        losses_of: each net's losses by name.
        num_frozen: the layers that were frozen.
        layout: devices x replicas, such as "4x2".
        transition_s: the seconds for which the layout was changed before the step.
        cache_hits: the samples whose outputs of the frozen layers came from the cache,
            over all replicas; 0 without a cache.
        cache_s: the seconds in which this worker read from the cache and stored in it,
            since the step before.
        recorded: the step's timeline, once `Pipeline.measured` has gathered it.
    """

    step: int
    loss: float
    losses: dict[str, float]
    num_samples: int
    seconds: float
    bubble_fraction: float
    peak_bytes: int
    gradient_status: PendingGradientStatus = field(repr=False, compare=False)
    losses_of: dict[str, dict[str, float]] = field(repr=False, default_factory=dict)
    num_frozen: int = 0
    layout: str = ""
    transition_s: float = 0.0
    cache_hits: int = 0
    cache_s: float = 0.0
    recorded: list[Timeline] = field(repr=False, compare=False, default_factory=list)

    @property
    def idle_s(self) -> dict[str, float] | None:
        """The seconds in which a device does not work, by cause: the mean over devices.

        The causes are those of `hocket.core.timelines.idle.Cause`. None unless
        `Pipeline.measured` was called after this step; where steps overlap, they are
        those of all steps of that timeline.
        """
        if not self.recorded:
            return None
        seconds = idle_by_cause(self.recorded[-1]).seconds
        return {cause.value: idle_s for cause, idle_s in seconds.items()}

    @property
    def grad_norm(self) -> float:
        """The norm of all gradients together, before they were clipped.

        Where steps overlap, it is known when the next result is; to ask earlier is to
        wait for all other workers, which takes what a flush does.

        Raises:
            WaitError: another worker did not report its gradients; or the pipeline
                ended before this one knew; or the step keeps none, as captured steps.
        """
        status = self.gradient_status.status
        if status.unknown:
            raise WaitError(status.unknown)
        return status.norm

    @property
    def skipped(self) -> bool:
        """Whether no weight was updated, for gradients of float16 were too large.

        Like `grad_norm`, it may wait for all other workers where steps overlap.
        """
        return not self.gradient_status.status.is_finite
