"""Checks the process's limits: open files and locked memory."""

from __future__ import annotations

import resource
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from hocket.draw.quantity import byte_size
from hocket.run.cluster.doctor.finding import Finding, Severity

# torch alone opens 60; a DataLoader's worker or a batch it sends takes a few each.
_FEW_FILES: Final = 128
_ENOUGH_FILES: Final = 4096
_FILES_PER_WORKER: Final = 8  # sockets of gloo and of the store
_UNLIMITED: Final = -1


@dataclass(frozen=True, slots=True)
class Limits:
    """This process's limits; -1 is no limit.

    Args:
        open_files: the files it may have open now.
        most_open_files: the value that it may raise this to.
        locked_bytes: the memory that it may lock against swapping.
        has_infiniband: whether the host has an InfiniBand or RoCE adapter.
    """

    open_files: int
    most_open_files: int
    locked_bytes: int
    has_infiniband: bool


def probe_limits() -> Limits:
    """Read the limits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    adapters = Path("/sys/class/infiniband")
    return Limits(
        open_files=soft,
        most_open_files=hard,
        locked_bytes=locked_bytes,
        has_infiniband=adapters.is_dir() and any(adapters.iterdir()),
    )


def judge_open_files(limits: Limits, num_workers: int) -> Finding:
    """Check that each worker can open all files that it needs.

    Args:
        limits: the host's limits.
        num_workers: workers of the whole job.
    """
    needed = _FEW_FILES + _FILES_PER_WORKER * num_workers
    allowed = limits.open_files
    found = f"{allowed:,} files may be open at a time"
    if allowed == _UNLIMITED or allowed >= max(needed, _ENOUGH_FILES):
        return Finding("open files", Severity.OK, found, numbers=asdict(limits))
    if allowed < needed:
        found += f"; each of {num_workers} workers needs about {needed:,}"
    return Finding(
        "open files",
        Severity.FAIL if allowed < needed else Severity.WARN,
        f"{found}; data loaders with workers may end in 'Too many open files'",
        _mend_open_files(limits.most_open_files),
        asdict(limits),
    )


def _mend_open_files(most: int) -> str:
    if most == _UNLIMITED or most >= _ENOUGH_FILES:
        return f"`ulimit -n {most if 0 < most < 2**20 else 65536}` before the start"
    return (
        f"raise the hard limit ({most:,}): `* hard nofile 65536` in "
        "/etc/security/limits.conf, or `docker run --ulimit nofile=65536`"
    )


def judge_locked_memory(limits: Limits) -> Finding:
    """Check that NCCL can register memory with the network adapter."""
    is_limited = limits.locked_bytes != _UNLIMITED
    amount = byte_size(limits.locked_bytes) if is_limited else "any amount"
    found = f"{amount} may be locked"
    if not is_limited or not limits.has_infiniband:
        found += ", and no InfiniBand adapter needs more" if is_limited else ""
        return Finding("locked memory", Severity.OK, found, numbers=asdict(limits))
    return Finding(
        "locked memory",
        Severity.WARN,
        f"{found}; NCCL over InfiniBand needs all that it registers",
        "`ulimit -l unlimited`, or `* - memlock unlimited` in "
        "/etc/security/limits.conf, or `docker run --ulimit memlock=-1`",
        asdict(limits),
    )
