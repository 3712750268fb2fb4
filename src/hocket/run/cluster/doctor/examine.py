"""Runs all checks: those of this host, and those of this process's job.

    alone             host
    launched workers  host ─┬─ job        (hocket doctor --workers 2)
    torchrun          host ─┤  rank 0 gathers and reports
                      host ─┘

On each host one worker checks the host.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from typing import Final, cast

import torch
import torch.distributed as dist

from hocket import env
from hocket.draw.quantity import byte_size, seconds
from hocket.errors import RunError
from hocket.run.cluster.doctor.finding import Finding, Severity
from hocket.run.cluster.doctor.gpu import (
    judge_clocks,
    judge_cuda_settings,
    judge_gpu_memory,
    judge_gpus,
    judge_nccl,
    probe_gpus,
)
from hocket.run.cluster.doctor.nvidia_smi import probe_gpu_states
from hocket.run.cluster.doctor.versions import (
    judge_same_versions,
    judge_versions,
    probe_versions,
)
from hocket.run.cluster.world import World, join_world
from hocket.run.diagnostics.job_folder import Json

# Checks that need several workers: rendezvous, software and links.


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


DEFAULT_PORT: Final = 29500  # of torchrun
_LISTENS: Final = "0A"  # as /proc/net/tcp writes the state
_FEW_FREE: Final = 256
_ENOUGH_FREE_SHARE: Final = 0.2


def examine_host() -> Iterator[Finding]:
    """Run every check of one host."""
    yield judge_versions(probe_versions())
    yield from _examine_gpus()
    ports = probe_ports()
    yield judge_free_ports(ports)
    if not env.MASTER_PORT.is_set:  # else the launcher of this job may have it
        yield judge_default_port(ports)


def examine() -> list[Finding]:
    """Run every check that this process can take part in.

    Returns:
        On rank 0 the findings of all workers; on other ranks nothing, unless the
        rendezvous failed: then this worker's own findings.
    """
    if not env.RANK.is_set:
        return list(examine_host())
    try:
        world = join_world()
    except RunError as error:
        if env.LOCAL_RANK.integer() != 0:
            return []
        return [*examine_host(), judge_failed_rendezvous(error)]
    with contextlib.closing(world):
        return _examine_together(world)


def worker() -> Json:
    """Run the checks as a worker that `hocket doctor --workers` has launched."""
    return [finding.to_json() for finding in examine()]


def _examine_gpus() -> Iterator[Finding]:
    """Run the checks of GPUs; only the first where torch has none to use."""
    gpus = probe_gpus()
    yield judge_gpus(gpus, env.LOCAL_WORLD_SIZE.integer(), env.BACKEND.text())
    if not gpus.devices:
        return
    usable = {device.uuid for device in gpus.devices}
    every = probe_gpu_states()
    states = [state for state in every if state.uuid in usable] or every
    yield judge_gpu_memory(states)
    yield judge_clocks(states)
    yield judge_nccl(gpus)
    yield judge_cuda_settings(
        env.CUDA_MODULE_LOADING.text(),
        env.CUDA_DEVICE_MAX_CONNECTIONS.text(),
        len(gpus.devices),
    )


def _examine_together(world: World) -> list[Finding]:
    own: list[Finding] = []
    if world.same_host[0] == world.rank:  # one worker checks each host
        own = list(examine_host())
    if len(set(world.hosts)) > 1:
        name = f"{socket.gethostname()} ({world.address or f'rank {world.rank}'})"
        own = [replace(finding, host=name) for finding in own]
    gathered = world.gather_json([finding.to_json() for finding in own], "findings")
    together = list(examine_job(world)) if world.world_size > 1 else []
    world.barrier("the end of the examination")
    if world.rank:
        return []
    return [Finding.from_json(one) for host in gathered for one in host] + together


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports on this host.

    Args:
        num_ports: ports that the system gives to outgoing connections.
        num_used: how many of these are in use.
        listening: ports on which some program listens.
    """

    num_ports: int
    num_used: int
    listening: tuple[int, ...]


def probe_ports() -> Ports:
    """Read the kernel's tables; nothing is opened."""
    span = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first, last = (
        map(int, span.read_text().split()) if span.exists() else (49152, 65535)
    )
    used: set[int] = set()
    listening: set[int] = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            _, local, _, state, *_ = line.split()
            port = int(local.rpartition(":")[2], 16)
            used.add(port)
            if state == _LISTENS:
                listening.add(port)
    num_used = sum(first <= port <= last for port in used)
    return Ports(last - first + 1, num_used, tuple(sorted(listening)))


def judge_free_ports(ports: Ports) -> Finding:
    """Check that connections can still be made."""
    num_free = ports.num_ports - ports.num_used
    found = f"{num_free:,} of {ports.num_ports:,} are free"
    numbers = asdict(ports)
    if num_free >= max(_FEW_FREE, _ENOUGH_FREE_SHARE * ports.num_ports):
        return Finding("free ports", Severity.OK, found, numbers=numbers)
    return Finding(
        "free ports",
        Severity.FAIL if num_free < _FEW_FREE else Severity.WARN,
        f"{found}; every two workers on different hosts need some",
        "`ss -tan` shows who has them; closed ones come back after a minute; "
        '`sysctl net.ipv4.ip_local_port_range="15000 65000"` gives more',
        numbers,
    )


def judge_default_port(ports: Ports) -> Finding:
    """Check that torchrun can listen on its default port."""
    check = f"port {DEFAULT_PORT}"
    if DEFAULT_PORT not in ports.listening:
        return Finding(check, Severity.OK, "torchrun's default is free")
    return Finding(
        check,
        Severity.WARN,
        "torchrun's default is taken: another job runs here, or is left from before",
        f"`ss -tlnp 'sport = {DEFAULT_PORT}'` shows whose it is; else give torchrun "
        "another --master-port, or --standalone on one host",
    )
