"""Checks what the host allows: free memory and disk, open files and locked memory."""

from __future__ import annotations

import os
import resource
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from hocket.draw.quantity import byte_size
from hocket.run.cluster.doctor.finding import Finding, Severity

_MIB: Final = 2**20
_GIB: Final = 2**30
_SHARED: Final = Path("/dev/shm")
_FEW_SHARED_BYTES: Final = 16 * _MIB
_ENOUGH_SHARED_BYTES: Final = _GIB  # docker gives 64 MiB
_FEW_DISK_BYTES: Final = 256 * _MIB
_ENOUGH_DISK_BYTES: Final = 10 * _GIB  # some checkpoints
_WORKER_BYTES: Final = 512 * _MIB  # a process with torch in it, and nothing else
_ENOUGH_WORKER_BYTES: Final = 2 * _GIB


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """One file system.

    Args:
        path: a folder in it.
        total_bytes: the file system's size; 0 if the folder is not there.
        free_bytes: the bytes that this user may still write.
        num_free_files: the files that may still be made; -1 if they are not counted.
        error: why nothing can be written; empty if writing works or was not tried.
    """

    path: str
    total_bytes: int
    free_bytes: int
    num_free_files: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The memory of this host, or of the container that this process is in.

    Args:
        available_bytes: the bytes that new processes may use without swapping.
    """

    available_bytes: int


def probe_shared_memory() -> DiskSpace:
    """Measure the file system of POSIX shared memory."""
    return _space(_SHARED)


def probe_disk(folder: Path) -> DiskSpace:
    """Measure the disk of a folder, and write a file there.

    Args:
        folder: where runs write; its nearest parent if it does not exist yet.
    """
    folder = folder.absolute()
    while not folder.is_dir():
        folder = folder.parent
    error = ""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as refused:
        error = refused.strerror or str(refused)
    return _space(folder, error)


def probe_memory() -> HostMemory:
    """Return the least of what the kernel and the control groups allow."""
    amounts = [_available_bytes(), *_group_bytes(Path("/sys/fs/cgroup"))]
    return HostMemory(min(amounts))


def judge_shared_memory(space: DiskSpace) -> Finding:
    """Check that data loaders and NCCL have shared memory for their batches."""
    severity = _severity(space.free_bytes, _FEW_SHARED_BYTES, _ENOUGH_SHARED_BYTES)
    found = f"{byte_size(space.free_bytes)} of {byte_size(space.total_bytes)} free"
    if severity is Severity.OK:
        return Finding("shared memory", severity, found, numbers=asdict(space))
    return Finding(
        "shared memory",
        severity,
        f"{found} in {space.path}; workers of data loaders end with a bus error where "
        "it is full, NCCL does not start",
        "`docker run --shm-size=8g`; elsewhere `mount -o remount,size=50% /dev/shm`, "
        "and remove what lies there",
        asdict(space),
    )


def judge_disk(space: DiskSpace) -> Finding:
    """Check that a run can write its files."""
    severity = _severity(space.free_bytes, _FEW_DISK_BYTES, _ENOUGH_DISK_BYTES)
    found = f"{byte_size(space.free_bytes)} free in {space.path}"
    mend = "delete old checkpoints, keep fewer of them, or choose another folder"
    if space.error:
        severity = Severity.FAIL
        found += f", but nothing can be written: {space.error}"
        mend = "choose a folder that this user may write to (--folder, --run-dir)"
    elif space.num_free_files == 0:
        severity, found = Severity.FAIL, f"{found}, but no file can be made (inodes)"
    mend = "" if severity is Severity.OK else mend
    return Finding("disk", severity, found, mend, asdict(space))


def judge_memory(memory: HostMemory, num_workers: int) -> Finding:
    """Check that this host's workers fit into its memory.

    Args:
        memory: this host's memory.
        num_workers: workers on this host.
    """
    share_bytes = memory.available_bytes // num_workers
    severity = _severity(share_bytes, _WORKER_BYTES, _ENOUGH_WORKER_BYTES)
    found = f"{byte_size(memory.available_bytes)} available"
    if num_workers > 1:
        found += f", {byte_size(share_bytes)} for each of {num_workers} workers"
    mend = ""
    if severity is not Severity.OK:
        found += f"; torch alone takes about {byte_size(_WORKER_BYTES)} in each"
        mend = "end other programs, start fewer workers, or give the container more"
    return Finding("memory", severity, found, mend, asdict(memory))


def _severity(has: int, few: int, enough: int) -> Severity:
    if has < few:
        return Severity.FAIL
    return Severity.WARN if has < enough else Severity.OK


def _space(path: Path, error: str = "") -> DiskSpace:
    if not path.is_dir():
        return DiskSpace(str(path), 0, 0, 0, "it does not exist")
    found = os.statvfs(path)
    return DiskSpace(
        str(path),
        found.f_blocks * found.f_frsize,
        found.f_bavail * found.f_frsize,
        found.f_favail if found.f_files else -1,
        error,
    )


def _available_bytes() -> int:
    """Return the kernel's MemAvailable, which counts reclaimable caches."""
    table = Path("/proc/meminfo")
    for line in table.read_text().splitlines() if table.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_bytes(root: Path) -> list[int]:
    """Return what a container's control group (version 1 or 2) leaves."""
    pairs = (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    )
    left = []
    for limit, used in pairs:
        if (root / limit).is_file() and (root / used).is_file():
            most = (root / limit).read_text().strip()
            if most.isdigit():
                left.append(int(most) - int((root / used).read_text()))
    return left


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
