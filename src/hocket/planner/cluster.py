"""The devices to plan for: their memory, and the links between them.

    node 0   0 ═ 1 ═ 2 ═ 3          ═ link      inside a node
             └───── network ─────┐  ─ network   between nodes, one card per node
    node 1   4 ═ 5 ═ 6 ═ 7 ──────┘

Workers are numbered as in `run/cluster/layout.py`: replica after replica, in each its
devices, and for each of these its shards. Several of them that send over one card at
the same time share its bandwidth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hocket.core.costs import Costs, Link, StageCost
from hocket.core.hardware import LinkKind
from hocket.errors import PlanError


@dataclass(frozen=True, slots=True)
class MessageCosts:
    """The costs of messages, for the simulator.

    Args:
        link: latency and bandwidth between devices.
        handling: the time that the lanes at both ends spend themselves.
    """

    link: Link
    handling: Link

    def costs(self, stages: Sequence[StageCost] = ()) -> Costs:
        """Return the costs of stages with these messages between any two devices."""
        return Costs(tuple(stages), link=self.link, handling=self.handling)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal devices in equal nodes.

    Args:
        num_devices: the devices in all nodes together.
        memory_bytes: the memory of each device for the model.
        link: the link between two devices of a node.
        network: the link between two nodes; each has one card.
        num_nodes: the nodes, each with equally many devices.
        name: the devices' name, for people.
        ring: the measured link of reductions over all devices of a node, if there is
            one.
        messages: the costs of messages between two devices of a node, if they are
            measured; cuts are balanced for `link` all the same.
        shares_cores: whether reductions slow down the devices' own work, as on CPUs
            without a spare core.

    Raises:
        PlanError: the nodes would not have equally many devices, or there is no network
            between them.
    """

    num_devices: int
    memory_bytes: int
    link: LinkKind
    network: LinkKind | None = None
    num_nodes: int = 1
    name: str = "device"
    ring: Link | None = None
    messages: MessageCosts | None = None
    shares_cores: bool = False

    def __post_init__(self) -> None:
        """Refuse impossible numbers."""
        if self.num_devices < 1 or self.num_nodes < 1:
            raise PlanError(
                f"{self.num_devices} devices in {self.num_nodes} nodes: there must be "
                "at least one of each"
            )
        if self.num_devices % self.num_nodes:
            raise PlanError(
                f"{self.num_devices} devices cannot be shared evenly by "
                f"{self.num_nodes} nodes: use a multiple"
            )
        if self.num_nodes > 1 and self.network is None:
            raise PlanError(
                f"{self.num_nodes} nodes need a network between them, such as 100gb"
            )

    @property
    def devices_per_node(self) -> int:
        """The devices in each node."""
        return self.num_devices // self.num_nodes

    @property
    def inside(self) -> Link:
        """The link between two devices of one node."""
        return self.link.link()

    @property
    def hop(self) -> Link:
        """The link that most messages between adjacent devices of a pipeline take."""
        leaves_nodes = self.num_nodes > 1 and self.devices_per_node == 1
        return self._between(1) if leaves_nodes else self.inside

    def pipeline_links(
        self, num_devices: int, num_replicas: int, num_shards: int = 1
    ) -> tuple[tuple[int, int, Link], ...]:
        """Return the pairs of adjacent devices of a pipeline on different nodes.

        The first and the last device are adjacent too, for schedules that go round.
        Replicas and shards run in lockstep: one represents all.
        """
        pairs = [(d, (d + 1) % num_devices) for d in range(num_devices)]
        size = num_devices * num_shards
        firsts = [r * size + s for r in range(num_replicas) for s in range(num_shards)]
        crossing = {
            (a, b): [
                self._node(first + a * num_shards)
                for first in firsts
                if self._node(first + a * num_shards)
                != self._node(first + b * num_shards)
            ]
            for a, b in pairs
        }
        num_sharing = _most(node for nodes in crossing.values() for node in nodes)
        return tuple(
            (*ends, self._between(num_sharing))
            for (a, b), nodes in crossing.items()
            if nodes
            for ends in ((a, b), (b, a))
        )

    def reduce_link(self, num_devices: int, num_replicas: int) -> Link:
        """Return the link that limits the rings of all devices with their replicas.

        Args:
            num_devices: the devices of one replica, with all shards.
            num_replicas: the replicas.
        """
        return self._ring_link(
            (replica * num_devices + d, (replica + 1) % num_replicas * num_devices + d)
            for replica in range(num_replicas)
            for d in range(num_devices)
        )

    def shard_link(self, num_shards: int) -> Link:
        """Return the link that limits the rings of all stages' shards."""
        return self._ring_link(
            (rank, rank + 1 if (rank + 1) % num_shards else rank + 1 - num_shards)
            for rank in range(self.num_devices)
        )

    def _ring_link(self, edges: Iterable[tuple[int, int]]) -> Link:
        crossing = [a for a, b in edges if self._node(a) != self._node(b)]
        if not crossing:
            return self.inside if self.ring is None else self.ring
        return self._between(_most(self._node(a) for a in crossing))

    def _node(self, rank: int) -> int:
        return rank // self.devices_per_node

    def _between(self, num_sharing: int) -> Link:
        assert self.network is not None  # several nodes have one
        return self.network.link(num_sharing)


def _most(nodes: Iterable[int]) -> int:
    """Return the largest number of connections that leave any node."""
    return max(Counter(nodes).values(), default=1)
