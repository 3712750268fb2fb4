"""Measures the memory that a worker may use, and that it has used."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Final

import torch

from hocket import cuda
from hocket.errors import RunError
from hocket.run.cluster.world import World

_STATM: Final = Path("/proc/self/statm")  # in pages: size, resident, ...
_CLEAR_REFS: Final = Path("/proc/self/clear_refs")
_RESET_PEAK: Final = "5"  # proc_pid_clear_refs(5)
_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")  # of a container's own
_SHARE: Final = 0.9  # the rest is for what no tensor holds: libraries, fragments


def memory_bytes(world: World) -> int:
    """Return the bytes for tensors on each device: 9/10 of what the fullest one has.

    Of a GPU, what other processes hold is not there. Workers of one host that share its
    GPUs or its memory share them evenly. Every worker must call this, and gets the same
    number.
    """
    device = world.device
    num_sharing = len(world.same_host)
    if device.type == "cuda":
        own = cuda.available_bytes(device)
        num_sharing = -(-num_sharing // cuda.num_devices())
    else:
        own = host_bytes()
    return int(min(world.gather_json(own // num_sharing, "memory")) * _SHARE)


def peak_bytes(device: torch.device) -> int:
    """Return the peak of this process: on the GPU, or in all on a CPU."""
    if device.type == "cuda":
        return cuda.peak_bytes(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes() -> int:
    """Return the bytes that this process holds now, with Python and its libraries."""
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()


def reset_resident_peak() -> None:
    """Let `peak_bytes` on a CPU start again at what the process holds now.

    Raises:
        RunError: the system refuses it.
    """
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError as error:
        raise RunError(
            f"{_CLEAR_REFS} refuses to reset the peak of this process's memory "
            f"({error}); read the peak since the process began instead"
        ) from error


def host_bytes() -> int:
    """Return the memory of the machine, or of the container if it has less."""
    num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if _CGROUP_LIMIT.exists():
        limit = _CGROUP_LIMIT.read_text().strip()
        if limit.isdigit():  # or "max"
            num_bytes = min(num_bytes, int(limit))
    return num_bytes
