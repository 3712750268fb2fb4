"""One way to train, and its predicted time and memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from hocket.core.layout import WorkerLayout
from hocket.planner.search.result import gap

ONE_DEVICE: Final = "one-device"
DDP: Final = "ddp"
ZERO_1: Final = "ddp+zero1"
FSDP: Final = "fsdp"
HSDP: Final = "hsdp"
REVERSE_FIRST_K: Final = "reverse-first-k"

# Data parallelism, and what runs it: a class of torch, or hocket.Pipeline.
DATA_PARALLEL: Final = {
    ONE_DEVICE: "all on one device; the others have nothing to do",
    DDP: "torch's DistributedDataParallel: a whole copy on each device",
    ZERO_1: "torch's DistributedDataParallel with its ZeroRedundancyOptimizer: a whole "
    "copy on each device, the optimizer's state sharded",
    FSDP: "torch's fully_shard: weights, gradients and optimizer state sharded",
    HSDP: "torch's fully_shard in replicas of sharded groups, one shard on each device",
    REVERSE_FIRST_K: "hocket.Pipeline with this schedule: a whole copy on each device, "
    "whose first weight gradients are computed last",
}


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """One way to train.

    Args:
        schedule: a name from the table of schedules, or one of `DATA_PARALLEL`.
        num_devices: the devices of one replica.
        num_replicas: copies of the pipeline.
        stages_per_device: the model's stages on each device.
        num_microbatches: the microbatches of each replica's part of the batch.
        recomputes: whether stages keep only their inputs, and run their forward again.
        num_shards: the devices that hold each stage of a replica together.
    """

    schedule: str
    num_devices: int
    num_replicas: int
    stages_per_device: int
    num_microbatches: int
    recomputes: bool = False
    num_shards: int = 1

    @property
    def layout(self) -> WorkerLayout:
        """Its devices: of one pipeline x replicas x shards."""
        return WorkerLayout(self.num_devices, self.num_replicas, self.num_shards)

    @property
    def num_pipelines(self) -> int:
        """How many devices train each stage, on other parts of the batch each."""
        return self.num_replicas * self.num_shards

    @property
    def is_data_parallel(self) -> bool:
        """Whether every device has the whole model (or its share of every layer)."""
        return self.schedule in DATA_PARALLEL

    @property
    def num_stages(self) -> int:
        """The stages of one replica."""
        return self.num_devices * self.stages_per_device

    def samples_of_microbatch(self, batch_size: int) -> int:
        """The samples in the largest microbatch of a batch."""
        return -(-batch_size // (self.num_pipelines * self.num_microbatches))


@dataclass(frozen=True, slots=True)
class MemorySplit:
    """A device's memory at its peak, by kind.

    Args:
        weight_bytes: one version of the weights, or of its shard of them.
        gradient_bytes: the gradients of the weights, or its shard of them.
        optimizer_bytes: the optimizer's state.
        activation_bytes: all that comes and goes: activations, messages, whole weights
            and gradients of shards, and what operators and reductions hold while they
            run.
        version_bytes: weights before the newest, if stages read old ones.
    """

    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    version_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The sum of all kinds."""
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True, slots=True)
class Buckets:
    """The buckets of gradients of reverse first-k.

    Args:
        k: how many of them have their weight gradients computed last.
        gradient_bytes: the gradients in each bucket, in forward order.
    """

    k: int
    gradient_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The prediction of a candidate.

    Args:
        candidate: the candidate.
        step_s: seconds of one step; of a flush-free order, the mean of many.
        samples_per_s: samples per second over all replicas.
        bubble_fraction: the share of a step in which a device does not compute: the
            mean over devices.
        memory: the memory of each device of one replica.
        budget_bytes: the memory that a device has for it.
        message_bytes: sent from device to device, per step and replica.
        reduce_bytes: gradients that are added up over the replicas, per step.
        boundaries: the layers at which stages 1, 2, ... begin.
        bound_s: no order of the same work on the same devices is faster, with every
            backward split.
        delay: the most updates by which a stage's weights are behind; 0 is exact.
        num_versions: the versions of each stage's weights.
        buckets: the buckets of reverse first-k; None for other schedules.
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
    buckets: Buckets | None = None

    @property
    def gap(self) -> float:
        """The share by which the step is longer than the bound."""
        return gap(self.step_s, self.bound_s)

    @property
    def fullest(self) -> MemorySplit:
        """The memory of the device that holds the most."""
        return max(self.memory, key=lambda split: split.total_bytes)

    @property
    def peak_bytes(self) -> int:
        """The bytes that this device holds."""
        return self.fullest.total_bytes

    @property
    def missing_bytes(self) -> int:
        """The bytes by which it does not fit; 0 if it does."""
        return max(0, self.peak_bytes - self.budget_bytes)

    @property
    def fits(self) -> bool:
        """Whether every device can hold what it must."""
        return not self.missing_bytes
