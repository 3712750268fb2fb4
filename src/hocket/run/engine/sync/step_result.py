"""What one step of training came to."""

from __future__ import annotations

from dataclasses import dataclass, field

from hocket.core.timelines.idle import idle_by_cause
from hocket.core.timelines.timeline import Timeline
from hocket.errors import WaitError
from hocket.run.data.loss import TOTAL
from hocket.run.device.late import Late
from hocket.run.weights.gradients import GradientStatus


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """How long a step took on one worker.

    Args:
        seconds: the whole step.
        busy_s: the part of them in which the worker's lane worked.
        end_s: when the step had ended, on this process's clock.
    """

    seconds: float
    busy_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step came to. Every worker gets the same losses.

    A device may still compute what is looked at: the losses, the norm of the gradients
    and the seconds are read at the first look, which waits for the step's end.

    Args:
        step: numbered from 0 over the life of the pipeline.
        num_samples: the samples of all its batches, over all replicas.
        peak_bytes: the most memory that this worker has held so far (on the GPU, or
            the process's resident set on a CPU).
        gradient_status: what its gradients were.
        net_losses: each net's losses by name.
        times: how long it took.
        num_frozen: the layers that were frozen.
        layout: devices x replicas, such as "4x2", x shards where there are any.
        transition_s: the seconds for which the layout was changed before the step.
        cache_hits: the samples whose outputs of the frozen layers came from the cache,
            over all replicas; 0 without a cache.
        cache_s: the seconds in which this worker read from the cache and stored in it,
            since the step before.
        recorded: the step's timeline, once `Pipeline.measured` has gathered it.
    """

    step: int
    num_samples: int
    peak_bytes: int
    gradient_status: Late[GradientStatus] = field(repr=False, compare=False)
    net_losses: Late[dict[str, dict[str, float]]] = field(repr=False, compare=False)
    times: Late[StepSeconds] = field(repr=False, compare=False)
    num_frozen: int = 0
    layout: str = ""
    transition_s: float = 0.0
    cache_hits: int = 0
    cache_s: float = 0.0
    recorded: list[Timeline] = field(repr=False, compare=False, default_factory=list)

    def __str__(self) -> str:
        """Write step, loss and seconds, which are read for it."""
        return f"step {self.step}: loss {self.loss:.4f}, {self.seconds:.3g} s"

    @property
    def loss(self) -> float:
        """What is trained, the mean over all samples of the step.

        Raises:
            NonFiniteError: the loss is not finite, and no weights were updated from it.
        """
        return self.losses.get(TOTAL, 0.0)

    @property
    def losses(self) -> dict[str, float]:
        """Every scalar that the loss function names, the mean over all samples.

        Those of one name in several nets are added up.

        Raises:
            NonFiniteError: see `loss`.
        """
        sums: dict[str, float] = {}
        for named in self.losses_of.values():
            for name, value in named.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums

    @property
    def losses_of(self) -> dict[str, dict[str, float]]:
        """Each net's losses by name.

        Raises:
            NonFiniteError: see `loss`.
        """
        return self.net_losses.value

    @property
    def seconds(self) -> float:
        """The seconds that the step took on this worker."""
        return self.times.value.seconds

    @property
    def bubble_fraction(self) -> float:
        """The share of `seconds` in which this worker's lane did not work."""
        times = self.times.value
        return 1.0 - times.busy_s / times.seconds

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
        status = self.gradient_status.value
        if status.unknown:
            raise WaitError(status.unknown)
        return status.norm

    @property
    def skipped(self) -> bool:
        """Whether no weight was updated, for gradients of float16 were too large.

        Like `grad_norm`, it may wait for all other workers where steps overlap.
        """
        return not self.gradient_status.value.is_finite
