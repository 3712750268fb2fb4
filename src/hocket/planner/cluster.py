"""What there is to compute on: devices, their memory, and the ways between them.

    node 0   0 ═ 1 ═ 2 ═ 3          ═ link      inside a node
             └───── network ─────┐  ─ network   between nodes, one card per node
    node 1   4 ═ 5 ═ 6 ═ 7 ──────┘

Workers are numbered as `run/cluster/layout.py` numbers them: replica after replica, and
in each its devices. What several of them send over one card at the same time, they
share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from hocket.core.costs import Link
from hocket.core.hardware import LinkKind
from hocket.errors import PlanError


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal devices in equal nodes.

    Args:
        num_devices: in all nodes together.
        memory_bytes: of each, that the model may have.
        link: between two devices of a node.
        network: between two nodes; each has one card.
        num_nodes: of equally many devices.
        name: of the devices, for people.
        ring: what reductions over all devices of a node took, where that was measured.
        shares_cores: whether a reduction takes the time of the devices' own work, as
            it does on CPUs that have no core to spare.

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
    shares_cores: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
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
        """In each node."""
        return self.num_devices // self.num_nodes

    @property
    def inside(self) -> Link:
        """Between two devices of one node."""
        return self.link.link()

    def pipeline_links(
        self, num_devices: int, num_replicas: int
    ) -> tuple[tuple[int, int, Link], ...]:
        """The pairs of neighbours of a pipeline that are on different nodes.

        The first and the last device are neighbours too, for those schedules that go
        round and round. Replicas run in lockstep: one stands for all.
        """
        pairs = [(d, (d + 1) % num_devices) for d in range(num_devices)]
        crossing = {
            (a, b): [
                self._node(replica * num_devices + a)
                for replica in range(num_replicas)
                if self._is_crossing(replica * num_devices, a, b)
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
        """What limits the rings of all devices with their replicas, all at once."""
        edges = [
            (replica * num_devices + d, (replica + 1) % num_replicas * num_devices + d)
            for replica in range(num_replicas)
            for d in range(num_devices)
        ]
        crossing = [a for a, b in edges if self._node(a) != self._node(b)]
        if not crossing:
            return self.inside if self.ring is None else self.ring
        return self._between(_most(self._node(a) for a in crossing))

    def _node(self, rank: int) -> int:
        return rank // self.devices_per_node

    def _is_crossing(self, first: int, a: int, b: int) -> bool:
        return self._node(first + a) != self._node(first + b)

    def _between(self, num_sharing: int) -> Link:
        assert self.network is not None  # several nodes have one
        return self.network.link(num_sharing)


def _most(nodes: Iterable[int]) -> int:
    """How many leave the node that most of them leave."""
    return max(Counter(nodes).values(), default=1)
