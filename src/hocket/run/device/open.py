"""Open the device that a worker computes on, with several lanes."""

from __future__ import annotations

import torch

from hocket import cuda
from hocket.run.device.cpu import CpuDevice
from hocket.run.device.device import Device
from hocket.run.device.memory import host_bytes
from hocket.run.device.sanitize import Sanitizer


def open_device(
    device: torch.device, num_lanes: int, *, timeout_s: float, sanitize: bool = False
) -> Device:
    """Open a device; its lanes are threads on a CPU, and streams on a GPU.

    Args:
        device: the torch device.
        num_lanes: the number of lanes.
        timeout_s: after which a wait of one lane for another ends with an error.
        sanitize: whether to check the accesses of its lanes.
    """
    sanitizer = Sanitizer(num_lanes) if sanitize else None
    if device.type == "cuda":
        from hocket.run.device.cuda import CudaDevice

        total = cuda.total_bytes(device)
        return CudaDevice(
            device,
            num_lanes,
            budget_bytes=total,
            timeout_s=timeout_s,
            sanitizer=sanitizer,
        )
    return CpuDevice(
        num_lanes, budget_bytes=host_bytes(), timeout_s=timeout_s, sanitizer=sanitizer
    )
