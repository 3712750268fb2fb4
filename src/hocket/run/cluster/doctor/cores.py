"""Whether the workers' threads have cores to run on."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from hocket import env
from hocket.run.cluster.doctor.finding import Finding, Verdict


@dataclass(frozen=True, slots=True)
class Cores:
    """Of one host.

    Args:
        num_cores: that this process may run on, as a container's quota may be a part
            of one.
        num_workers: on this host.
        num_threads: of each worker.
        load: processes that wanted to run at a time, over the last minute.
    """

    num_cores: float
    num_workers: int
    num_threads: int
    load: float


def probe_cores() -> Cores:
    """Ask the system, and torch."""
    cores = float(len(os.sched_getaffinity(0)))
    return Cores(
        num_cores=min(cores, _quota(Path("/sys/fs/cgroup")) or cores),
        num_workers=env.LOCAL_WORLD_SIZE.integer(),
        num_threads=torch.get_num_threads(),
        load=os.getloadavg()[0],
    )


def judge_cores(cores: Cores) -> Finding:
    """Whether threads take cores from each other."""
    wanted = cores.num_workers * cores.num_threads
    found = (
        f"{cores.num_workers} worker{'s' * (cores.num_workers > 1)} x "
        f"{cores.num_threads} thread{'s' * (cores.num_threads > 1)} on "
        f"{cores.num_cores:g} cores"
    )
    if wanted <= cores.num_cores:
        return Finding("cores", Verdict.OK, found, numbers=asdict(cores))
    fair = max(1, int(cores.num_cores) // cores.num_workers)
    few = cores.num_workers > cores.num_cores
    return Finding(
        "cores",
        Verdict.WARN,
        f"{found}: they wait for each other",
        "start fewer workers" if few else f"OMP_NUM_THREADS={fair}",
        asdict(cores),
    )


def judge_load(cores: Cores) -> Finding:
    """Whether other programs leave the cores to this one."""
    found = f"a load of {cores.load:.1f} on {cores.num_cores:g} cores"
    if cores.load <= cores.num_cores:
        return Finding("load", Verdict.OK, found, numbers=asdict(cores))
    return Finding(
        "load",
        Verdict.WARN,
        f"{found}: a profile measured now will be wrong",
        "end what else runs here (`top` shows it), or wait for it",
        asdict(cores),
    )


def _quota(root: Path) -> float:
    """Cores that a container may use; 0 where there is no quota."""
    new, old = root / "cpu.max", root / "cpu" / "cpu.cfs_quota_us"
    if new.is_file():
        quota, period = new.read_text().split()
    elif old.is_file():
        quota = old.read_text().strip()
        period = old.with_name("cpu.cfs_period_us").read_text()
    else:
        return 0.0
    return int(quota) / int(period) if quota.isdigit() else 0.0
