"""Small workloads whose numbers can be worked out by hand."""

from __future__ import annotations

from functools import cache
from typing import Final

from hocket.core.hardware import LinkKind
from hocket.planner.cluster import Cluster
from hocket.planner.rank import Search, rank
from hocket.planner.ranking.report import Ranking
from hocket.planner.work import LayerCost, MeasuredCosts, Weights

MIB: Final = 2**20
EVERYTHING: Final = Search(is_exhaustive=True)


def layers(
    num_layers: int,
    *,
    seconds: float = 0.01,
    weight_bytes: int = 8 * MIB,
    activation_bytes: int = 4 * MIB,
    message_bytes: int = MIB,
) -> tuple[LayerCost, ...]:
    """Equal layers; F, I and W take `seconds` each for one sample."""
    return tuple(
        LayerCost(
            f"layer{i}",
            seconds,
            seconds,
            seconds,
            activation_bytes=activation_bytes,
            received_bytes=message_bytes if i else 0,
            received_grad_bytes=message_bytes if i else 0,
            backward_work_bytes=MIB,
            weights=(
                Weights(f"weight{i}", weight_bytes, weight_bytes, 2 * weight_bytes),
            ),
        )
        for i in range(num_layers)
    )


@cache
def work(
    num_layers: int = 8,
    *,
    seconds: float = 0.01,
    weight_bytes: int = 8 * MIB,
    activation_bytes: int = 4 * MIB,
    message_bytes: int = MIB,
    update_s_per_byte: float = 0.0,
) -> MeasuredCosts:
    """A model that was measured with one sample, and grows in proportion."""
    one = layers(
        num_layers,
        seconds=seconds,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        message_bytes=message_bytes,
    )
    return MeasuredCosts("Toy", (1, 1), (one, one), update_s_per_byte, "a toy")


def cluster(
    num_devices: int,
    *,
    memory_bytes: int = 10**12,
    bytes_per_s: float = 1e11,
    latency_s: float = 0.0,
    num_nodes: int = 1,
    network_bytes_per_s: float = 1e9,
) -> Cluster:
    """Equal devices; links reach what they promise."""
    link = LinkKind("toy", "a toy link", bytes_per_s, latency_s, 1.0, "made up")
    network = LinkKind(
        "net", "a toy network", network_bytes_per_s, latency_s, 1.0, "made up"
    )
    return Cluster(
        num_devices,
        memory_bytes,
        link,
        network if num_nodes > 1 else None,
        num_nodes,
        "toy device",
    )


@cache
def ranked(
    job: MeasuredCosts, devices: Cluster, batch_size: int, search: Search
) -> Ranking:
    """As `rank`; of tests that ask the same, the first one has it worked out."""
    return rank(job, devices, batch_size, search)
