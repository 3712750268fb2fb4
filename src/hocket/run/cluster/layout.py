"""Maps ranks to the devices of a pipeline, its replicas, and their shards.

rank      0  1 │ 2  3 ║ 4  5 │ 6  7      8 workers: 2 devices, 2 replicas, 2 shards
shard     0  1 │ 0  1 ║ 0  1 │ 0  1      neighbours, between which most bytes travel
device    0    │ 1    ║ 0    │ 1
replica   0           ║ 1
pipeline  0  1 │ 0  1 ║ 2  3 │ 2  3      trains on a part of the batch of its own

Where a model is parallelised over a tp axis (DTensor), each place above is taken by as
many neighbours as the axis has ranks. Each of them has pipelines of its own, over those
of the same tp rank, and plays the same ops on its parts of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hocket.errors import ModelError, ShapeError
from hocket.model.trace.local import is_sharded
from hocket.run.cluster.group import GroupMaker, WorkerGroup
from hocket.run.cluster.world import World


@dataclass(frozen=True, slots=True)
class Layout:
    """The ranks by device, replica and shard, and this worker's own.

    Args:
        rank: this worker's rank.
        num_devices: workers in one pipeline.
        num_replicas: copies of the weights of all stages.
        num_shards: workers that hold one copy of a stage together.
        tp_size: workers that compute each op together, on parts of its weights.
    """

    rank: int
    num_devices: int
    num_replicas: int
    num_shards: int = 1
    tp_size: int = 1

    @property
    def num_pipelines(self) -> int:
        """Pipelines, each of which trains on a part of the batch of its own."""
        return self.num_replicas * self.num_shards

    @property
    def device(self) -> int:
        """This worker's device in its pipeline."""
        return self.device_of(self.rank)

    @property
    def shard(self) -> int:
        """This worker's place among those that hold a copy of its stages together."""
        return self.rank // self.tp_size % self.num_shards

    @property
    def tp_rank(self) -> int:
        """This worker's place among those that compute its ops together."""
        return self.rank % self.tp_size

    @property
    def every(self) -> tuple[Layout, ...]:
        """It as each of them sees it; by the first one's, all decide alike."""
        first, places = self.rank - self.tp_rank, range(self.tp_size)
        return tuple(replace(self, rank=first + place) for place in places)

    @property
    def pipeline(self) -> int:
        """This worker's pipeline."""
        replica = self.rank // (self.num_devices * self.num_shards * self.tp_size)
        return replica * self.num_shards + self.shard

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each device of this pipeline."""
        return tuple(self.ranks_of(d)[self.pipeline] for d in range(self.num_devices))

    def device_of(self, rank: int) -> int:
        """Return a worker's device in its pipeline."""
        return rank // self.tp_size // self.num_shards % self.num_devices

    def ranks_of(self, device: int) -> tuple[int, ...]:
        """Return the ranks that have a device's stages, one per pipeline."""
        size = self.tp_size
        return tuple(
            ((replica * self.num_devices + device) * self.num_shards + shard) * size
            + self.tp_rank
            for replica in range(self.num_replicas)
            for shard in range(self.num_shards)
        )


def make_layout(
    world: World, num_replicas: int, num_shards: int = 1, tp_size: int = 1
) -> Layout:
    """Split the world's workers into replicas, and these into shards.

    Args:
        world: all workers.
        num_replicas: the copies of the weights of all stages.
        num_shards: the workers that hold one copy of a stage together.
        tp_size: the workers that compute each op together.

    Raises:
        ShapeError: the workers cannot be split evenly; names the numbers that would do.
    """
    size, each = world.world_size // tp_size, num_replicas * num_shards
    if num_replicas < 1 or num_shards < 1 or size % each:
        what = f"{size} workers" if tp_size == 1 else f"{size} x {tp_size} (tp) workers"
        if num_shards > 1:
            raise ShapeError(
                f"{what} cannot form {num_replicas} replicas of {num_shards} "
                "shards: the workers must be a multiple of num_replicas x num_shards, "
                f"{num_replicas} x {num_shards} = {each}"
            )
        fits = [n for n in range(1, size + 1) if size % n == 0]
        raise ShapeError(
            f"{what} cannot form {num_replicas} equal replicas; "
            f"num_replicas may be {', '.join(map(str, fits))}"
        )
    return Layout(world.rank, size // each, num_replicas, num_shards, tp_size)


def tp_size_of(model: nn.Module, world: World) -> int:
    """Return how many workers compute each op together: a mesh of the model's DTensors.

    Raises:
        ModelError: the model is sharded in another way than over one tp axis.
        ShapeError: the ranks of this axis are no neighbours, or not in this job.
    """
    size = 0
    fsdp = any(hasattr(x, "set_reshard_after_forward") for x in model.modules())
    every = (*model.named_parameters(), *model.named_buffers())
    for name, x in every:
        if not is_sharded(x):
            continue
        dtensor: Any = x
        ranks = dtensor.device_mesh.mesh.tolist()
        # Those of other axes, as fsdp, ep and cp, compute other samples or words.
        if dtensor.device_mesh.mesh_dim_names not in (None, ("tp",)) or fsdp:
            raise ModelError(
                f"the model's {name} is sharded over {dtensor.device_mesh}: a model is "
                "taken with DTensors of one axis named tp (`parallelize_module`, a "
                "tp_plan), and not of others (`fully_shard`, expert or context "
                "parallel); num_shards= shards the stages of a model without DTensors"
            )
        before, size = size, len(ranks)
        first = world.rank - world.rank % size
        of_two = before not in (0, size)
        if of_two or ranks != [*range(first, first + size)] or world.world_size % size:
            raise ShapeError(
                f"the model's {name} is parallelised over ranks {ranks}, and this is "
                f"rank {world.rank} of {world.world_size}: tp must be the last axis of "
                "the mesh, init_device_mesh(device, (pp, tp)), over all of the job, "
                "and one for all weights"
            )
    return size or 1


def replica_group(layout: Layout, groups: GroupMaker) -> WorkerGroup | None:
    """Make the group of those with this worker's stages; all workers must call it.

    Args:
        layout: the job's ranks.
        groups: the run's.
    """
    if layout.num_pipelines == 1:
        return None
    ranks = [layout.ranks_of(device) for device in range(layout.num_devices)]
    return groups.join(ranks)[0]
