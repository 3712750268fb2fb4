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
from dataclasses import replace
from pathlib import Path

from hocket import env
from hocket.errors import RunError
from hocket.run.cluster.doctor.cores import judge_cores, judge_load, probe_cores
from hocket.run.cluster.doctor.cuda_settings import (
    judge_cuda_settings,
    probe_cuda_settings,
)
from hocket.run.cluster.doctor.finding import Finding
from hocket.run.cluster.doctor.gpu import (
    judge_gpus,
    judge_nccl,
    judge_peer_access,
    probe_gpus,
)
from hocket.run.cluster.doctor.gpu_state import judge_clocks, judge_gpu_memory
from hocket.run.cluster.doctor.host_name import judge_name, probe_name
from hocket.run.cluster.doctor.job import examine_job, judge_failed_rendezvous
from hocket.run.cluster.doctor.limits import (
    judge_locked_memory,
    judge_open_files,
    probe_limits,
)
from hocket.run.cluster.doctor.nvidia_smi import probe_gpu_states
from hocket.run.cluster.doctor.ports import (
    judge_default_port,
    judge_free_ports,
    probe_ports,
)
from hocket.run.cluster.doctor.space import (
    judge_disk,
    judge_memory,
    judge_shared_memory,
    probe_disk,
    probe_memory,
    probe_shared_memory,
)
from hocket.run.cluster.doctor.versions import (
    judge_encoding,
    judge_versions,
    probe_versions,
)
from hocket.run.cluster.world import World, join_world
from hocket.run.diagnostics.job_folder import Json


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
