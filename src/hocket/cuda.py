"""CUDA devices: which there are, their memory, and their random numbers.

Of the whole package only this file and `run/device/cuda.py`, the adapter with lanes,
events and graphs, name `torch.cuda`. Except for the first two functions, call these
only where there are CUDA devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

NATIVE_ALLOCATOR: Final = "native"  # torch's own; the other one is cudaMallocAsync


def is_available() -> bool:
    """Return whether torch can use a CUDA device."""
    return torch.cuda.is_available()


def num_devices() -> int:
    """Return the number of CUDA devices that this process sees."""
    return torch.cuda.device_count()


def start() -> None:
    """Start CUDA in this process.

    Raises:
        RuntimeError: the driver refuses.
        AssertionError: torch was built without CUDA.
    """
    torch.cuda.init()


def use(device: torch.device) -> None:
    """Make a device the one that this thread uses where none is named."""
    torch.cuda.set_device(device)


def device_name(device: torch.device | int) -> str:
    """Return the name of a device's model."""
    return torch.cuda.get_device_properties(device).name


def device_uuid(device: torch.device | int) -> str:
    """Return the identifier of a device, as `nvidia-smi` prints it."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def total_bytes(device: torch.device | int) -> int:
    """Return the size of a device's memory."""
    return torch.cuda.get_device_properties(device).total_memory


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes that this process's tensors hold now."""
    return torch.cuda.memory_allocated(device)


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes that tensors held since `reset_peak`."""
    return torch.cuda.max_memory_allocated(device)


def reset_peak(device: torch.device) -> None:
    """Let `peak_bytes` start again at what tensors hold now."""
    torch.cuda.reset_peak_memory_stats(device)


def limit_bytes(device: torch.device, num_bytes: int) -> None:
    """Let this process allocate at most so many bytes of a device."""
    share = min(1.0, num_bytes / total_bytes(device))
    torch.cuda.set_per_process_memory_fraction(share, device)


def generator(device: torch.device) -> torch.Generator:
    """Return the default generator of a device."""
    torch.cuda.init()  # until then there is none
    return torch.cuda.default_generators[device.index or 0]


def available_bytes(device: torch.device) -> int:
    """Return the bytes that this process's tensors may hold, those there are included.

    What other processes and this one's CUDA context hold is not available.
    """
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


def nccl_version() -> tuple[int, ...]:
    """Return the version of NCCL that torch was built with."""
    return tuple(torch.cuda.nccl.version())


def replace_generator(
    device: torch.device, replace: Callable[[torch.Generator], Any]
) -> Callable[[], None]:
    """Let `torch.cuda.get_rng_state` and its like use another object.

    Args:
        device: the device.
        replace: given its default generator, returns what stands for it.

    Returns:
        A function that undoes it.
    """
    before = torch.cuda.default_generators
    generators: list[Any] = list(before)
    index = device.index or 0
    generators[index] = replace(before[index])
    torch.cuda.default_generators = tuple(generators)

    def undo() -> None:
        torch.cuda.default_generators = before

    return undo


def allocator_backend() -> str:
    """Return the allocator that this process uses: native or cudaMallocAsync."""
    return torch.cuda.get_allocator_backend()


def finish_stream(device: torch.device) -> None:
    """Wait until the current stream has done its work, if no graph is captured."""
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()
