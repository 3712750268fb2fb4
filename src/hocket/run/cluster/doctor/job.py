"""Checks that need several workers: rendezvous, software and links."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import combinations, pairwise
from statistics import median
from typing import Final, cast

import torch
import torch.distributed as dist

from hocket import env
from hocket.draw.quantity import byte_size, seconds
from hocket.run.cluster.doctor.finding import Finding, Severity
from hocket.run.cluster.doctor.versions import judge_same_versions, probe_versions
from hocket.run.cluster.world import World

_MAX_PAIRS: Final = 64  # 12 workers, each with each; a pair takes half a second at most
_SMALL_BYTES: Final = 2**16
_LARGE_BYTES: Final = 2**24
_LONG_S: Final = 0.1  # for one all-reduce
_NUM_TRIES: Final = 3
_PAIR_TIMEOUT_S: Final = 10.0
_SLOW_SHARE: Final = 1 / 3  # of the median: another cable, or other traffic
_SLOW_BYTES_PER_S: Final = 12.5e6  # 100 Mb/s: a model of 100 MB takes 8 s


def examine_job(world: World) -> Iterator[Finding]:
    """Run every check that needs other workers. Every worker must call this.

    Args:
        world: the job; at least two workers.
    """
    yield judge_rendezvous(world.hosts, world.gather_json(interface_of(world)))
    versions = world.gather_json(asdict(probe_versions()), "versions")
    yield judge_same_versions(versions)
    devices = {torch.device("cpu"), world.device}
    for device in sorted(devices, key=str):
        backend = "gloo" if device.type == "cpu" else "NCCL"
        yield judge_links(measure_links(world, device), backend)


def interface_of(world: World) -> str:
    """Describe the interface that this worker listens on."""
    interface = env.GLOO_INTERFACE.text() or "what its name leads to"
    return f"{interface} ({world.address})" if world.address else interface


def judge_rendezvous(hosts: Sequence[str], interfaces: Sequence[str]) -> Finding:
    """Report how the workers found each other.

    Args:
        hosts: the host of each rank.
        interfaces: the interface that each rank listens on.
    """
    num_hosts = len(set(hosts))
    kinds = ", ".join(dict.fromkeys(interfaces))
    found = (
        f"{len(hosts)} workers on {num_hosts} host{'s' * (num_hosts > 1)} met, over "
        f"{kinds}"
    )
    return Finding("rendezvous", Severity.OK, found)


def judge_failed_rendezvous(error: Exception) -> Finding:
    """Report why the workers did not find each other."""
    return Finding(
        "rendezvous",
        Severity.FAIL,
        str(error),
        "the same --rdzv-endpoint (or --master-addr and --master-port) on every host, "
        "an address that all of them reach (`nc -vz ADDRESS PORT`), no firewall "
        "between, and --local-addr where a host's name leads elsewhere",
    )


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """The bandwidth and latency between two workers.

    Args:
        ranks: the two ranks.
        same_host: whether both are on one host.
        bytes_per_s: the rate of a large all-reduce; each byte goes both ways.
        latency_s: the time of an all-reduce of one number.
        error: why it failed; empty if it did not.
    """

    ranks: tuple[int, int]
    same_host: bool
    bytes_per_s: float
    latency_s: float
    error: str = ""


def measure_links(world: World, device: torch.device) -> list[MeasuredLink]:
    """Measure one pair of workers after another. Every worker must call this.

    Args:
        world: all workers.
        device: a CPU for gloo, a CUDA device for NCCL.
    """
    backend = "gloo" if device.type == "cpu" else "nccl"
    timeout = timedelta(seconds=min(_PAIR_TIMEOUT_S, world.timeout_s))
    own: list[MeasuredLink] = []
    for pair in pairs_of(world.hosts):
        group = dist.new_group(list(pair), timeout=timeout, backend=backend)
        world.barrier(f"link {pair}")
        if world.rank in pair:
            link = _measure(world, cast(dist.ProcessGroup, group), pair, device)
            own += [link] if world.rank == pair[0] else []
    gathered = world.gather_json([asdict(x) for x in own], f"links over {backend}")
    found = [MeasuredLink(**one) for links in gathered for one in links]
    return sorted(found, key=lambda link: tuple(link.ranks))


def pairs_of(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Return every two ranks; for many, each rank and each host with the next.

    Args:
        hosts: the host of each rank.
    """
    ranks = range(len(hosts))
    pairs = list(combinations(ranks, 2))
    if len(pairs) <= _MAX_PAIRS:
        return pairs
    firsts = sorted(hosts.index(host) for host in set(hosts))
    some = {*pairwise(ranks), *pairwise(firsts)}
    return sorted(some)[:_MAX_PAIRS]


def judge_links(links: Sequence[MeasuredLink], backend: str) -> Finding:
    """Check that every pair works, and that none is much slower than its kind."""
    check = f"all-reduce, {backend}"
    numbers = {"links": [asdict(link) for link in links]}
    broken = [link for link in links if link.error]
    if broken:
        first = broken[0]
        return Finding(
            check,
            Severity.FAIL,
            f"{len(broken)} of {len(links)} pairs cannot: ranks {_both(first)}: "
            f"{first.error}",
            "look for a firewall between the hosts, and set GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME to the interface that connects them",
            numbers,
        )
    kinds = {
        kind: [link for link in links if link.same_host is same]
        for kind, same in (("on one host", True), ("between hosts", False))
    }
    found = "; ".join(_summary(kind, ls) for kind, ls in kinds.items() if ls)
    slow = [link for ls in kinds.values() for link in _slow(ls)]
    if not slow:
        return Finding(check, Severity.OK, found, numbers=numbers)
    worst = min(slow, key=lambda link: link.bytes_per_s)
    return Finding(
        check,
        Severity.WARN,
        f"{found}; slow: {', '.join(_both(link) for link in slow[:6])}, at worst "
        f"{byte_size(worst.bytes_per_s)}/s",
        "compare with what the network should give; `ethtool` shows the link's speed, "
        "GLOO_SOCKET_IFNAME chooses another interface; put stages that talk much on "
        "one host",
        numbers,
    )


def _measure(
    world: World, group: dist.ProcessGroup, pair: tuple[int, int], device: torch.device
) -> MeasuredLink:
    same_host = world.hosts[pair[0]] == world.hosts[pair[1]]
    try:
        latency_s = min(_rounds(torch.ones(1, device=device), group, 8))
        num_bytes = _SMALL_BYTES
        time_s = min(_rounds(_flat(num_bytes, device), group, _NUM_TRIES))
        while num_bytes < _LARGE_BYTES and _both_agree(time_s < _LONG_S, group, device):
            num_bytes *= 4
            time_s = min(_rounds(_flat(num_bytes, device), group, _NUM_TRIES))
    except RuntimeError as error:
        said = str(error).strip().split("\n", 1)[0]
        return MeasuredLink(pair, same_host, 0.0, 0.0, said)
    return MeasuredLink(pair, same_host, num_bytes / time_s, latency_s)


def _rounds(
    tensor: torch.Tensor, group: dist.ProcessGroup, num_rounds: int
) -> Iterator[float]:
    """Return the seconds of each all-reduce after a first one, which is not counted."""
    for number in range(num_rounds + 1):
        begin_s = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        tensor.mul_(0.5)  # so that it stays what it was, and GPUs have come to an end
        tensor[0].item()
        if number:
            yield time.perf_counter() - begin_s


def _both_agree(
    condition: bool, group: dist.ProcessGroup, device: torch.device
) -> bool:
    """Agree on whether both go on: each measures by its own clock."""
    votes = torch.tensor([float(condition)], device=device)
    dist.all_reduce(votes, group=group)
    return votes.item() == 2.0


def _flat(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.ones(num_bytes // 4, device=device)


def _slow(links: Sequence[MeasuredLink]) -> list[MeasuredLink]:
    """Return the links that are slow among their kind, or slow for any."""
    usual = median(link.bytes_per_s for link in links) if links else 0.0
    return [
        link
        for link in links
        if link.bytes_per_s < max(_SLOW_SHARE * usual, _SLOW_BYTES_PER_S)
    ]


def _summary(kind: str, links: Sequence[MeasuredLink]) -> str:
    usual = median(link.bytes_per_s for link in links)
    latency_s = median(link.latency_s for link in links)
    pairs = f"{len(links)} pair{'s' * (len(links) > 1)}"
    return f"{pairs} {kind} at {byte_size(usual)}/s, {seconds(latency_s)} at least"


def _both(link: MeasuredLink) -> str:
    return f"{link.ranks[0]} and {link.ranks[1]}"
