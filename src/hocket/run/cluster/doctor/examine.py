"""Runs all checks: those of this host, and those of this process's job.

    alone             host
    launched workers  host ─┬─ job        (hocket doctor --workers 2)
    torchrun          host ─┤  rank 0 gathers and reports
                      host ─┘

On each host one worker checks the host, its name too: torchrun gives it to the other
hosts as an address.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import torch

from hocket import env
from hocket.errors import RunError
from hocket.run.cluster.doctor.finding import Finding, Severity
from hocket.run.cluster.doctor.gpu import (
    judge_cuda_settings,
    judge_gpus,
    judge_nccl,
    judge_peer_access,
    probe_cuda_settings,
    probe_gpus,
)
from hocket.run.cluster.doctor.gpu_state import judge_clocks, judge_gpu_memory
from hocket.run.cluster.doctor.job import examine_job, judge_failed_rendezvous
from hocket.run.cluster.doctor.limits import (
    judge_disk,
    judge_locked_memory,
    judge_memory,
    judge_open_files,
    judge_shared_memory,
    probe_disk,
    probe_limits,
    probe_memory,
    probe_shared_memory,
)
from hocket.run.cluster.doctor.nvidia_smi import probe_gpu_states
from hocket.run.cluster.doctor.versions import (
    judge_encoding,
    judge_versions,
    probe_versions,
)
from hocket.run.cluster.host import address_towards, interfaces, is_loopback
from hocket.run.cluster.world import World, join_world
from hocket.run.diagnostics.job_folder import Json

DEFAULT_PORT: Final = 29500  # of torchrun
_LISTENS: Final = "0A"  # as /proc/net/tcp writes the state
_FEW_FREE: Final = 256
_ENOUGH_FREE_SHARE: Final = 0.2


def examine_host(folder: Path, world: World | None = None) -> Iterator[Finding]:
    """Run every check of one host.

    Args:
        folder: the folder that runs write to.
        world: the job, if this process is a worker of one.
    """
    num_workers = env.LOCAL_WORLD_SIZE.integer()
    versions = probe_versions()
    yield judge_versions(versions)
    yield judge_encoding(versions)
    yield from _examine_gpus(num_workers)
    cores = probe_cores()
    yield judge_cores(cores)
    yield judge_load(cores)
    yield judge_memory(probe_memory(), num_workers)
    yield judge_shared_memory(probe_shared_memory())
    yield judge_disk(probe_disk(folder))
    limits = probe_limits()
    yield judge_open_files(limits, 1 if world is None else world.world_size)
    yield judge_locked_memory(limits)
    yield judge_name(probe_name("" if world is None else world.address))
    ports = probe_ports()
    yield judge_free_ports(ports)
    if not env.MASTER_PORT.is_set:  # else the launcher of this job may have it
        yield judge_default_port(ports)


def examine(folder: Path) -> list[Finding]:
    """Run every check that this process can take part in.

    Returns:
        On rank 0 the findings of all workers; on other ranks nothing, unless the
        rendezvous failed: then this worker's own findings.
    """
    if not env.RANK.is_set:
        return list(examine_host(folder))
    try:
        world = join_world()
    except RunError as error:
        if env.LOCAL_RANK.integer() != 0:
            return []
        return [*examine_host(folder), judge_failed_rendezvous(error)]
    with contextlib.closing(world):
        return _examine_together(world, folder)


def worker(folder: str) -> Json:
    """Run the checks as a worker that `hocket doctor --workers` has launched."""
    return [finding.to_json() for finding in examine(Path(folder))]


def _examine_gpus(num_workers: int) -> Iterator[Finding]:
    """Run the checks of GPUs; only the first where torch has none to use."""
    gpus = probe_gpus()
    yield judge_gpus(gpus, num_workers, env.BACKEND.text())
    if not gpus.devices:
        return
    usable = {device.uuid for device in gpus.devices}
    every = probe_gpu_states()
    states = [state for state in every if state.uuid in usable] or every
    yield judge_gpu_memory(states)
    yield judge_clocks(states)
    yield judge_peer_access(gpus)
    yield judge_nccl(gpus)
    yield judge_cuda_settings(probe_cuda_settings(), len(gpus.devices))


def _examine_together(world: World, folder: Path) -> list[Finding]:
    own: list[Finding] = []
    if world.same_host[0] == world.rank:  # one worker checks each host
        own = list(examine_host(folder, world))
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
class Cores:
    """The cores of one host, and what uses them.

    Args:
        num_cores: cores that this process may use; a fraction under a container's
            quota.
        num_workers: workers on this host.
        num_threads: threads of each worker.
        load: processes that wanted to run at a time, mean of the last minute.
    """

    num_cores: float
    num_workers: int
    num_threads: int
    load: float


def probe_cores() -> Cores:
    """Read the number of cores, threads and the load."""
    cores = float(len(os.sched_getaffinity(0)))
    return Cores(
        num_cores=min(cores, _quota(Path("/sys/fs/cgroup")) or cores),
        num_workers=env.LOCAL_WORLD_SIZE.integer(),
        num_threads=torch.get_num_threads(),
        load=os.getloadavg()[0],
    )


def judge_cores(cores: Cores) -> Finding:
    """Check that threads do not share cores."""
    wanted = cores.num_workers * cores.num_threads
    found = (
        f"{cores.num_workers} worker{'s' * (cores.num_workers > 1)} x "
        f"{cores.num_threads} thread{'s' * (cores.num_threads > 1)} on "
        f"{cores.num_cores:g} cores"
    )
    if wanted <= cores.num_cores:
        return Finding("cores", Severity.OK, found, numbers=asdict(cores))
    fair = max(1, int(cores.num_cores) // cores.num_workers)
    few = cores.num_workers > cores.num_cores
    return Finding(
        "cores",
        Severity.WARN,
        f"{found}: they wait for each other",
        "start fewer workers" if few else f"OMP_NUM_THREADS={fair}",
        asdict(cores),
    )


def judge_load(cores: Cores) -> Finding:
    """Check that other programs leave the cores free."""
    found = f"a load of {cores.load:.1f} on {cores.num_cores:g} cores"
    if cores.load <= cores.num_cores:
        return Finding("load", Severity.OK, found, numbers=asdict(cores))
    return Finding(
        "load",
        Severity.WARN,
        f"{found}: a profile measured now will be wrong",
        "end what else runs here (`top` shows it), or wait for it",
        asdict(cores),
    )


def _quota(root: Path) -> float:
    """Return the cores that a container may use; 0 if it has no quota."""
    new, old = root / "cpu.max", root / "cpu" / "cpu.cfs_quota_us"
    if new.is_file():
        quota, period = new.read_text().split()
    elif old.is_file():
        quota = old.read_text().strip()
        period = old.with_name("cpu.cfs_period_us").read_text()
    else:
        return 0.0
    return int(quota) / int(period) if quota.isdigit() else 0.0


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


_ELSEWHERE: Final = "192.0.2.1"  # kept free for documentation (RFC 5737)


@dataclass(frozen=True, slots=True)
class Naming:
    """The host's name, and the addresses that it resolves to.

    Args:
        name: the host's name.
        resolved: the addresses that the name resolves to on this host.
        error: why it does not resolve; empty if it does.
        own: this host's addresses.
        used: the address at which the other hosts of the job reach this one; on a job
            of one host, and without a job, the one towards the network; empty if there
            is none.
    """

    name: str
    resolved: tuple[str, ...]
    error: str
    own: tuple[str, ...]
    used: str


def probe_name(used: str = "") -> Naming:
    """Resolve the name as other programs do.

    Args:
        used: see `Naming`; if not known, the address towards the network.
    """
    name, error = socket.gethostname(), ""
    resolved: tuple[str, ...] = ()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        resolved = tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
    except OSError as refused:
        error = str(refused)
    own = tuple(address for _, address in interfaces())
    return Naming(name, resolved, error, own, used or address_towards(_ELSEWHERE))


def judge_name(naming: Naming) -> Finding:
    """Check that other hosts find this one under its name."""
    fault = _fault(naming)
    leads_to = f"{naming.name} is {', '.join(naming.resolved) or 'nowhere'}"
    if not fault:
        return Finding("host name", Severity.OK, leads_to, numbers=asdict(naming))
    address = naming.used or "ADDRESS"
    return Finding(
        "host name",
        Severity.WARN,
        f"{leads_to}: {fault}",
        f"on several hosts, write `{address} {naming.name}` into /etc/hosts of each in "
        f"place of what is there, or give torchrun --local-addr {address}",
        asdict(naming),
    )


def _fault(naming: Naming) -> str:
    """Return what is wrong with the name; empty if nothing is."""
    if naming.error:
        return f"it does not resolve ({naming.error})"
    if all(is_loopback(address) for address in naming.own):
        return ""  # this host has no network, so no other host looks for it
    if all(is_loopback(address) for address in naming.resolved):
        return "under it, other hosts look for this one on themselves"
    if not set(naming.resolved) & set(naming.own):
        return f"this host has other addresses ({', '.join(naming.own)})"
    if naming.used and naming.used not in naming.resolved:
        return f"the other hosts reach it at {naming.used}"
    return ""
