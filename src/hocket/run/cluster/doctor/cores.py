"""Checks that the workers' threads have cores to run on."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from hocket import env
from hocket.run.cluster.doctor.finding import Finding, Severity


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
