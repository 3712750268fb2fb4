"""The data-parallel experiments of out-of-order backprop, on the simulator.

    python -m bench.ooo_data.experiments

Oh et al., "Out-Of-Order BackProp", EuroSys'22, doi 10.1145/3492321.3519563: ResNet-50
and -101 on hosts of four V100s each, beside BytePS. Numbers of hosts and samples, and
the k that its artifact names, are those of its scripts; the network has 10 or 25 Gb/s
there. The paper says 1.10 to 1.27 times BytePS for all of them together.

Here reductions are a ring over all devices, limited by the hosts' network cards. They
do not slow down what is computed meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Final

from bench.networks.single_convolutions import resnet_convolutions
from hocket.core.costs import Costs
from hocket.core.hardware import Catalogue, load_catalogue
from hocket.core.op import Kind
from hocket.draw.quantity import seconds
from hocket.planner.cluster import Cluster
from hocket.planner.replicas.buckets import BucketSearch, choose_buckets
from hocket.planner.stages import BUCKET_BYTES, stage_costs
from hocket.planner.work import CountedCosts, LayerCost

PUBLISHED: Final = (1.10, 1.27)
DEVICE: Final = "v100-16g"
PRECISION: Final = "float32"
NUM_HOSTS: Final = (1, 4, 8, 12)
DEVICES_PER_HOST: Final = 4
NETWORKS: Final = ("1gb", "10gb", "25gb", "100gb")
_HOST_S: Final = 20e-6  # of each op


@dataclass(frozen=True, slots=True)
class Network:
    """What is trained.

    Args:
        name: of the network.
        depth: its layers.
        batch_size: samples of each device.
        published_ks: the k of the artifact's scripts, by hosts.
    """

    name: str
    depth: int
    batch_size: int
    published_ks: tuple[int, ...]


TRAINED: Final = (
    Network("ResNet-50", 50, 128, (45, 45, 45, 30)),
    Network("ResNet-101", 101, 96, (70, 70, 70, 70)),
)


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the table; seconds are those of a step.

    Args:
        network: what is trained.
        num_hosts: of four devices each.
        link: between hosts; inside of one where there is one.
        r: reductions over computing, if nothing overlapped.
        compute_s: of forward, backward and update.
        ddp_s: with DDP's 25 MB.
        ddp_best_s: with the best of the sizes that reverse first-k can choose from.
        barrier_s: the chosen buckets in the usual order.
        found_s: with the chosen buckets and k.
        num_buckets: that were chosen.
        k: of these buckets.
        k_layers: the layers in the first k buckets.
        published_k: the artifact's, in layers.
        published_s: with it, each layer a bucket.
    """

    network: str
    num_hosts: int
    link: str
    r: float
    compute_s: float
    ddp_s: float
    ddp_best_s: float
    barrier_s: float
    found_s: float
    num_buckets: int
    k: int
    k_layers: int
    published_k: int
    published_s: float

    @property
    def over_ddp(self) -> float:
        """How many times faster than DDP as it comes."""
        return self.ddp_s / self.found_s

    @property
    def over_best(self) -> float:
        """How many times faster than DDP with its best size of buckets."""
        return self.ddp_best_s / self.found_s


def simulated() -> Iterator[Result]:
    """Yield all rows; one host has one row, since its network does not matter."""
    catalogue = load_catalogue()
    for network in TRAINED:
        layers = _layers(network, catalogue)
        for number, num_hosts in enumerate(NUM_HOSTS):
            for link in NETWORKS if num_hosts > 1 else NETWORKS[:1]:
                cluster = _cluster(catalogue, num_hosts, link)
                search = _search(layers, cluster)
                name = link if num_hosts > 1 else cluster.link.key
                published_k = network.published_ks[number]
                yield _result(network, num_hosts, name, search, published_k)


def table(results: list[Result]) -> list[list[str]]:
    """Return the rows for people, the head first."""
    head = ["network", "hosts x devices", "link", "r", "DDP", "DDP, best buckets"]
    more = [
        "reverse first-k",
        "k of buckets",
        "over DDP",
        "over its best",
        "artifact's k",
    ]
    return [
        [*head, *more],
        *(
            [
                x.network,
                f"{x.num_hosts} x {DEVICES_PER_HOST}",
                x.link,
                f"{x.r:.2f}",
                seconds(x.ddp_s),
                seconds(x.ddp_best_s),
                seconds(x.found_s),
                f"{x.k} of {x.num_buckets}",
                f"**{x.over_ddp:.2f}**",
                f"**{x.over_best:.2f}**",
                f"{x.published_k}: {x.ddp_s / x.published_s:.2f}",
            ]
            for x in results
        ),
    ]


def _layers(network: Network, catalogue: Catalogue) -> tuple[LayerCost, ...]:
    ops = tuple(layer.ops() for layer in resnet_convolutions(network.depth))
    device = catalogue.device(DEVICE)
    return CountedCosts(network.name, ops, device, PRECISION).layers(network.batch_size)


def _cluster(catalogue: Catalogue, num_hosts: int, link: str) -> Cluster:
    device = catalogue.device(DEVICE)
    return Cluster(
        num_hosts * DEVICES_PER_HOST,
        device.usable_bytes,
        catalogue.link(device.links[0]),
        catalogue.link(link) if num_hosts > 1 else None,
        num_hosts,
    )


def _search(layers: tuple[LayerCost, ...], cluster: Cluster) -> BucketSearch:
    num = cluster.num_devices
    make = partial(stage_costs, layers, recomputes=False, update_s_per_byte=0.0)
    costs = Costs((), reduce_link=cluster.reduce_link(1, num), op_s=_HOST_S)
    return BucketSearch(
        layers, cache(make), costs, num, memory_bytes=cluster.memory_bytes
    )


def _result(
    network: Network,
    num_hosts: int,
    link: str,
    search: BucketSearch,
    published_k: int,
) -> Result:
    (whole,) = search.stages(())
    compute_s = whole.forward_s + whole.seconds(Kind.BACKWARD)
    ring_s = search.costs.reduce_link.ring_s(whole.gradient_bytes, search.num_replicas)
    found = choose_buckets(search)
    layer_by_layer = tuple(range(1, len(search.layers)))
    edges = (0, *found.boundaries, len(search.layers))
    return Result(
        network.name,
        num_hosts,
        link,
        ring_s / compute_s,
        compute_s,
        _ddp(search, (BUCKET_BYTES,)),
        _ddp(search, (*search.sizes, BUCKET_BYTES)),
        search.tried(found.boundaries, 0, barrier=True).step_s,
        found.step_s,
        found.num_buckets,
        found.k,
        edges[found.k],
        published_k,
        search.tried(layer_by_layer, published_k).step_s,
    )


def _ddp(search: BucketSearch, sizes: tuple[float, ...]) -> float:
    """Return the step of the usual order with a barrier, of the best size."""
    cuts = replace(search, sizes=sizes).cuts()
    return min(search.tried(cut, 0, barrier=True).step_s for cut in cuts)


def main() -> None:
    """Print the table, and what it is made of."""
    results = [*simulated()]
    for row in table(results):
        print(" | ".join(row))
    for result in results:
        print(asdict(result))


if __name__ == "__main__":
    main()
