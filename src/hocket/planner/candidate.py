"""One way to train, and what is predicted of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hocket.planner.search.result import gap

ONE_DEVICE: Final = "one-device"
DDP: Final = "ddp"
ZERO_1: Final = "ddp+zero1"
FSDP: Final = "fsdp"

# Plain data parallelism, and whose work it is.
DATA_PARALLEL: Final = {
    ONE_DEVICE: "all on one device; the others have nothing to do",
    DDP: "torch's DistributedDataParallel: a whole copy on each device",
    ZERO_1: "the same with torch's ZeroRedundancyOptimizer: optimizer state sharded",
    FSDP: "torch's fully_shard: weights, gradients and optimizer state sharded",
}


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """One way to train.

    Args:
        schedule: a name from the table of schedules, or one of `DATA_PARALLEL`.
        num_devices: of one replica.
        num_replicas: copies of the pipeline.
        stages_per_device: of the model.
        num_microbatches: that each replica cuts its part of the batch into.
        recomputes: whether stages keep only their inputs, and run their forward again.
    """

    schedule: str
    num_devices: int
    num_replicas: int
    stages_per_device: int
    num_microbatches: int
    recomputes: bool = False

    @property
    def is_data_parallel(self) -> bool:
        """Whether every device has the whole model (or its share of every layer)."""
        return self.schedule in DATA_PARALLEL

    @property
    def num_stages(self) -> int:
        """Of one replica."""
        return self.num_devices * self.stages_per_device

    def samples_of_microbatch(self, batch_size: int) -> int:
        """The samples in the largest microbatch of a batch."""
        return -(-batch_size // (self.num_replicas * self.num_microbatches))


@dataclass(frozen=True, slots=True)
class MemorySplit:
    """What one device holds when it holds the most.

    Args:
        weight_bytes: one version of the weights.
        gradient_bytes: of them.
        optimizer_bytes: the optimizer's state, without what follows last.
        activation_bytes: all that comes and goes: activations, messages, and what
            operators and reductions hold while they run.
        version_bytes: of weights before the newest, where stages read old ones, and of
            guesses that are read in place of the newest.
        correction_bytes: what a correction of old gradients keeps beside.
    """

    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    version_bytes: int = 0
    correction_bytes: int = 0

    @property
    def update_bytes(self) -> int:
        """What updates keep for later ones."""
        return self.optimizer_bytes + self.correction_bytes

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return (
            self.weight_bytes
            + self.gradient_bytes
            + self.update_bytes
            + self.activation_bytes
            + self.version_bytes
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is predicted of a candidate.

    Args:
        candidate: what was predicted.
        step_s: one step; of an order without a flush, one of many.
        samples_per_s: over all replicas.
        bubble_fraction: the share of a step in which a device does not compute: the
            mean over devices.
        memory: of each device of one replica.
        budget_bytes: what a device may hold.
        message_bytes: sent from device to device, per step and replica.
        reduce_bytes: gradients that are added up over the replicas, per step.
        boundaries: the layers at which stages 1, 2, ... begin.
        bound_s: no order of the same work on the same devices is faster, with every
            backward split.
        delay: the most updates by which a stage's weights are behind; 0 is exact.
        num_versions: of the weights of each stage, guesses among them.
    """

    candidate: Candidate
    step_s: float
    samples_per_s: float
    bubble_fraction: float
    memory: tuple[MemorySplit, ...]
    budget_bytes: int
    message_bytes: int
    reduce_bytes: int
    boundaries: tuple[int, ...]
    bound_s: float
    delay: int = 0
    num_versions: tuple[int, ...] = ()

    @property
    def gap(self) -> float:
        """By which share the step is longer than the bound."""
        return gap(self.step_s, self.bound_s)

    @property
    def fullest(self) -> MemorySplit:
        """Of the device that holds the most."""
        return max(self.memory, key=lambda split: split.total_bytes)

    @property
    def peak_bytes(self) -> int:
        """What that device holds."""
        return self.fullest.total_bytes

    @property
    def missing_bytes(self) -> int:
        """By how much it does not fit; 0 where it does."""
        return max(0, self.peak_bytes - self.budget_bytes)

    @property
    def fits(self) -> bool:
        """Whether every device can hold what it must."""
        return not self.missing_bytes
