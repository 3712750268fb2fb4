"""Maps ranks to the devices of a pipeline, its replicas, and their shards.

rank      0  1 │ 2  3 ║ 4  5 │ 6  7      8 workers: 2 devices, 2 replicas, 2 shards
shard     0  1 │ 0  1 ║ 0  1 │ 0  1      neighbours, between which most bytes travel
device    0    │ 1    ║ 0    │ 1
replica   0           ║ 1
pipeline  0  1 │ 0  1 ║ 2  3 │ 2  3      trains on a part of the batch of its own
"""

from __future__ import annotations

from dataclasses import dataclass

from hocket.errors import ShapeError
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
    """

    rank: int
    num_devices: int
    num_replicas: int
    num_shards: int = 1

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
        return self.rank % self.num_shards

    @property
    def pipeline(self) -> int:
        """This worker's pipeline."""
        replica = self.rank // (self.num_devices * self.num_shards)
        return replica * self.num_shards + self.shard

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each device of this pipeline."""
        return tuple(self.ranks_of(d)[self.pipeline] for d in range(self.num_devices))

    def device_of(self, rank: int) -> int:
        """Return a worker's device in its pipeline."""
        return rank // self.num_shards % self.num_devices

    def ranks_of(self, device: int) -> tuple[int, ...]:
        """Return the ranks that have a device's stages, one per pipeline."""
        return tuple(
            (replica * self.num_devices + device) * self.num_shards + shard
            for replica in range(self.num_replicas)
            for shard in range(self.num_shards)
        )


def make_layout(world: World, num_replicas: int, num_shards: int = 1) -> Layout:
    """Split the world's workers into replicas, and these into shards.

    Raises:
        ShapeError: the workers cannot be split evenly; names the numbers that would do.
    """
    size, each = world.world_size, num_replicas * num_shards
    if num_replicas < 1 or num_shards < 1 or size % each:
        if num_shards > 1:
            raise ShapeError(
                f"{size} workers cannot form {num_replicas} replicas of {num_shards} "
                "shards: the workers must be a multiple of num_replicas x num_shards, "
                f"{num_replicas} x {num_shards} = {each}"
            )
        fits = [n for n in range(1, size + 1) if size % n == 0]
        raise ShapeError(
            f"{size} workers cannot form {num_replicas} equal replicas; "
            f"num_replicas may be {', '.join(map(str, fits))}"
        )
    return Layout(world.rank, size // each, num_replicas, num_shards)


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
