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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from hocket import env
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
from hocket.run.cluster.doctor.job import examine_job, judge_failed_rendezvous
from hocket.run.cluster.doctor.nvidia_smi import probe_gpu_states
from hocket.run.cluster.doctor.versions import judge_versions, probe_versions
from hocket.run.cluster.world import World, join_world
from hocket.run.diagnostics.job_folder import Json

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
