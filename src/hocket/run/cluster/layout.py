"""Maps ranks to the devices of a pipeline and to its replicas.

rank      0  1  2  3 │ 4  5  6  7      8 workers, 2 replicas
device    0  1  2  3 │ 0  1  2  3
replica   0          │ 1
"""

from __future__ import annotations

from dataclasses import dataclass

from hocket.errors import ShapeError
from hocket.run.cluster.group import GroupMaker, WorkerGroup
from hocket.run.cluster.world import World


@dataclass(frozen=True, slots=True)
class Layout:
    """The ranks by device and replica, and this worker's own.

    Args:
        rank: this worker's rank.
        num_devices: workers in one replica.
        num_replicas: copies of the pipeline.
    """

    rank: int
    num_devices: int
    num_replicas: int

    @property
    def device(self) -> int:
        """This worker's device in its replica."""
        return self.rank % self.num_devices

    @property
    def replica(self) -> int:
        """This worker's replica."""
        return self.rank // self.num_devices

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each device of this replica."""
        first = self.replica * self.num_devices
        return tuple(range(first, first + self.num_devices))

    def replicas_of(self, device: int) -> tuple[int, ...]:
        """Return the ranks that hold a device's stages, one per replica."""
        return tuple(
            replica * self.num_devices + device for replica in range(self.num_replicas)
        )


def make_layout(world: World, num_replicas: int) -> Layout:
    """Split the world's workers into replicas.

    Raises:
        ShapeError: the workers cannot be split evenly; names the numbers that would do.
    """
    if num_replicas < 1 or world.world_size % num_replicas:
        fits = [n for n in range(1, world.world_size + 1) if world.world_size % n == 0]
        raise ShapeError(
            f"{world.world_size} workers cannot form {num_replicas} equal replicas; "
            f"num_replicas may be {', '.join(map(str, fits))}"
        )
    return Layout(world.rank, world.world_size // num_replicas, num_replicas)


def replica_group(layout: Layout, groups: GroupMaker) -> WorkerGroup | None:
    """Make the group of this worker and its replicas; every worker must call this.

    Args:
        layout: the job's ranks.
        groups: the run's.
    """
    if layout.num_replicas == 1:
        return None
    ranks = [layout.replicas_of(device) for device in range(layout.num_devices)]
    return groups.join(ranks)[0]
