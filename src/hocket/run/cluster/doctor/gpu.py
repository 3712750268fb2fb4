"""Checks GPUs: the driver, torch's access, NCCL, free memory and clocks.

A posted receive is a kernel that runs until its message arrives. Whatever waits for it
without need may wait for ever:

    stream of messages   │ receive 1B0's gradient ........................
    stream of the lane   │ 1F1, the first use of a kernel ── loading it waits
                                                             for the receive
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from torch.distributed import is_nccl_available

from hocket import cuda, env
from hocket.draw.quantity import byte_size
from hocket.run.cluster.doctor.finding import Finding, Severity
from hocket.run.cluster.doctor.nvidia_smi import ClockLimit, GpuState
from hocket.run.diagnostics.job_folder import Json

_FEW_FREE_BYTES: Final = 2**30  # CUDA's context, cuBLAS and NCCL alone take as much
_ENOUGH_FREE_SHARE: Final = 0.9
_REASONS: Final = {
    ClockLimit.USER: "a user setting of the clocks",
    ClockLimit.HARDWARE: "heat or a lack of power",
    ClockLimit.SOFTWARE_HEAT: "heat",
    ClockLimit.HEAT: "heat",
    ClockLimit.POWER_BRAKE: "the power supply",
}
_NO_STATE: Final = "`nvidia-smi` is missing or reports nothing"
_GET_STATE: Final = (
    "install the driver's tools; in a container, NVIDIA_DRIVER_CAPABILITIES="
    "compute,utility"
)
_DEFAULT_CONNECTIONS: Final = 8


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU that torch can use.

    Args:
        name: the model's name, as the driver reports it.
        memory_bytes: its memory.
        uuid: the driver's identifier, as `nvidia-smi` prints it; empty if unknown.
    """

    name: str
    memory_bytes: int
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class HostGpus:
    """The GPUs of one host, and the driver and torch build that use them.

    Args:
        driver: version of NVIDIA's kernel driver; empty if none is loaded.
        torch: torch's version.
        cuda: the CUDA version that torch was built for; empty for a CPU build.
        error: torch's error if it was built for GPUs and cannot use them.
        devices: the GPUs that torch can use.
        nccl: the version of NCCL that torch has; empty if it has none.
    """

    driver: str
    torch: str
    cuda: str
    error: str
    devices: tuple[Gpu, ...]
    nccl: str = ""


def probe_gpus() -> HostGpus:
    """Query the kernel driver and torch."""
    devices: list[Gpu] = []
    if cuda.is_available():
        for number in range(cuda.num_devices()):
            name, uuid = cuda.device_name(number), cuda.device_uuid(number)
            devices.append(Gpu(name, cuda.total_bytes(number), uuid))
    return HostGpus(
        driver=driver_version(Path("/proc/driver/nvidia/version")),
        torch=str(torch.__version__),
        cuda=torch.version.cuda or torch.version.hip or "",
        error="" if devices else _why_not(),
        devices=tuple(devices),
        nccl=_nccl_version(),
    )


def judge_gpus(gpus: HostGpus, num_workers: int, backend: str = "") -> Finding:
    """Check that torch can use the GPUs, and that each worker has one.

    Args:
        gpus: this host's GPUs.
        num_workers: workers on this host.
        backend: what was asked for to carry messages; empty for the default.
    """
    numbers = asdict(gpus)
    if not gpus.devices:
        return _judge_none(gpus)
    names = ", ".join(sorted({device.name for device in gpus.devices}))
    least_bytes = min(device.memory_bytes for device in gpus.devices)
    found = (
        f"{len(gpus.devices)} x {names} with {byte_size(least_bytes)}, driver "
        f"{gpus.driver or 'unknown'}, torch for CUDA {gpus.cuda}"
    )
    if num_workers <= len(gpus.devices):
        return Finding("GPU", Severity.OK, found, numbers=numbers)
    found += f"; but {num_workers} workers on this host"
    mend = f"--nproc-per-node {len(gpus.devices)}"
    if backend == "gloo":
        found += ": those that share a GPU wait for each other"
        return Finding("GPU", Severity.WARN, found, mend, numbers)
    mend += (
        ", HOCKET_BACKEND=gloo to share GPUs by way of the host, or HOCKET_DEVICE=cpu"
    )
    return Finding("GPU", Severity.FAIL, found, mend, numbers)


def judge_nccl(gpus: HostGpus) -> Finding:
    """Check that GPUs can exchange messages."""
    if gpus.nccl:
        return Finding("NCCL", Severity.OK, f"NCCL {gpus.nccl}")
    found = f"torch {gpus.torch} was built without NCCL"
    if len(gpus.devices) < 2:
        return Finding("NCCL", Severity.OK, f"{found}; one GPU needs none")
    return Finding(
        "NCCL",
        Severity.FAIL,
        f"{found}: {len(gpus.devices)} GPUs cannot exchange messages",
        "install the build of torch for CUDA on Linux (pytorch.org shows the command)",
    )


def judge_gpu_memory(states: Sequence[GpuState]) -> Finding:
    """Check that the memory of all GPUs is free, and name the processes that hold it.

    Args:
        states: the GPUs that torch can use.
    """
    check = "GPU memory"
    if not states:
        return Finding(check, Severity.WARN, f"unknown: {_NO_STATE}", _GET_STATE)
    numbers: dict[str, Json] = {
        str(state.index): [state.free_bytes, state.total_bytes] for state in states
    }
    used = [s for s in states if s.free_bytes < _ENOUGH_FREE_SHARE * s.total_bytes]
    if not used:
        least_bytes = min(state.free_bytes for state in states)
        found = f"at least {byte_size(least_bytes)} free on each"
        return Finding(check, Severity.OK, found, numbers=numbers)
    full = any(state.free_bytes < _FEW_FREE_BYTES for state in used)
    return Finding(
        check,
        Severity.FAIL if full else Severity.WARN,
        "; ".join(map(_holders, used)),
        "end these processes (`kill PID`; `nvidia-smi` shows them), or choose other "
        "GPUs with CUDA_VISIBLE_DEVICES",
        numbers,
    )


def judge_clocks(states: Sequence[GpuState]) -> Finding:
    """Check that neither heat, nor power, nor a setting lowers the clocks.

    Args:
        states: the GPUs that torch can use.
    """
    check = "GPU clocks"
    if not states:
        return Finding(check, Severity.WARN, f"unknown: {_NO_STATE}", _GET_STATE)
    numbers: dict[str, Json] = {
        str(state.index): [state.sm_mhz, state.max_sm_mhz] for state in states
    }
    slow = [state for state in states if state.limits]
    if not slow:
        highest = sorted({state.max_sm_mhz for state in states})
        found = f"nothing lowers them; at most {' or '.join(map(str, highest))} MHz"
        return Finding(check, Severity.OK, found, numbers=numbers)
    lowered = "; ".join(
        f"GPU {state.index} at {state.sm_mhz} of {state.max_sm_mhz} MHz, lowered by "
        + " and ".join(dict.fromkeys(_REASONS[limit] for limit in state.limits))
        for state in slow
    )
    mend = "`nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER` shows more; "
    if any(ClockLimit.USER in state.limits for state in slow):
        mend += "`nvidia-smi -rgc -rac` (as root) frees clocks that were set"
    else:
        mend += "check cooling and power: a stage on a slow GPU slows down all others"
    return Finding(
        check,
        Severity.WARN,
        f"{lowered}: a profile measured now will be wrong",
        mend,
        numbers,
    )


def judge_cuda_settings(loading: str, connections: str, num_gpus: int) -> Finding:
    """Check that kernels need not wait for messages that wait for them.

    Args:
        loading: CUDA_MODULE_LOADING; empty if it is not set: workers over NCCL set it.
        connections: CUDA_DEVICE_MAX_CONNECTIONS, the number of hardware queues; empty
            if it is not set.
        num_gpus: GPUs of this host; one alone has no messages.
    """
    faults: list[tuple[str, str]] = []
    if num_gpus > 1 and loading.upper() not in ("", "EAGER"):
        name = env.CUDA_MODULE_LOADING.name
        found = (
            f"{name} is {loading}: the first use of a kernel may wait for the whole "
            "device, and so for a posted receive"
        )
        faults.append((found, f"unset {name}"))
    if connections.isdigit() and int(connections) < _DEFAULT_CONNECTIONS:
        name = env.CUDA_DEVICE_MAX_CONNECTIONS.name
        found = (
            f"{name}={connections}: with so few hardware queues, lanes wait for each "
            "other, and for posted receives"
        )
        faults.append((found, f"unset {name} (it is {_DEFAULT_CONNECTIONS} then)"))
    return Finding(
        "CUDA settings",
        Severity.WARN if faults else Severity.OK,
        "; ".join(found for found, _ in faults) or "kernels need not wait for messages",
        ", ".join(mend for _, mend in faults),
    )


def _judge_none(gpus: HostGpus) -> Finding:
    """Report why torch has no GPU to use, if one should be there."""
    numbers = asdict(gpus)
    if not gpus.driver:
        found = "no GPU: no driver is loaded, so training runs on the CPU"
        return Finding("GPU", Severity.OK, found, numbers=numbers)
    if not gpus.cuda:
        return Finding(
            "GPU",
            Severity.WARN,
            f"driver {gpus.driver} is loaded, but torch {gpus.torch} was built without "
            "CUDA: training runs on the CPU",
            "install the build of torch for CUDA (pytorch.org shows the command)",
            numbers,
        )
    return Finding(
        "GPU",
        Severity.FAIL,
        f"driver {gpus.driver} is loaded, but torch {gpus.torch} for CUDA {gpus.cuda} "
        f"cannot use it: {gpus.error or 'it sees no device'}",
        f"a driver that is new enough for CUDA {gpus.cuda}, or a torch for an older "
        "one; in a container, `docker run --gpus all`; CUDA_VISIBLE_DEVICES must not "
        "be empty",
        numbers,
    )


def driver_version(path: Path) -> str:
    """Return the version of NVIDIA's kernel module."""
    if not path.exists():
        return ""
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", path.read_text())
    return found[1] if found else "of an unknown version"


def _nccl_version() -> str:
    if not is_nccl_available():
        return ""
    return ".".join(map(str, cuda.nccl_version()))


def _why_not() -> str:
    """Return torch's error when it is made to use a GPU and cannot."""
    try:
        cuda.start()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().split("\n", 1)[0]
    return ""


def _holders(state: GpuState) -> str:
    """Return how much of a GPU's memory is free, and who holds the rest."""
    names = [
        f"{one.name} (process {one.pid}, {byte_size(one.used_bytes)})"
        for one in state.processes
        if one.pid != os.getpid()
    ]
    free, total = byte_size(state.free_bytes), byte_size(state.total_bytes)
    held = ", ".join(names) or "no process that can be seen from here"
    return f"GPU {state.index} has {free} of {total} free, the rest is held by {held}"
