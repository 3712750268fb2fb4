"""Checks GPUs: the driver, torch's access, NCCL, and access to each other's memory.

And the environment variables that change how CUDA loads and runs kernels. A posted
receive is a kernel that runs until its message arrives. Whatever waits for it without
need may wait for ever:

    stream of messages   │ receive 1B0's gradient ........................
    stream of the lane   │ 1F1, the first use of a kernel ── loading it waits
                                                             for the receive
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from torch.distributed import is_nccl_available

from hocket import cuda, env
from hocket.draw.quantity import byte_size
from hocket.run.cluster.doctor.finding import Finding, Severity


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
        apart: pairs of GPUs that cannot read each other's memory.
        nccl: the version of NCCL that torch has; empty if it has none.
    """

    driver: str
    torch: str
    cuda: str
    error: str
    devices: tuple[Gpu, ...]
    apart: tuple[tuple[int, int], ...]
    nccl: str = ""


def probe_gpus() -> HostGpus:
    """Query the kernel driver and torch."""
    devices: list[Gpu] = []
    apart: list[tuple[int, int]] = []
    if cuda.is_available():
        numbers = range(cuda.num_devices())
        for number in numbers:
            name, uuid = cuda.device_name(number), cuda.device_uuid(number)
            devices.append(Gpu(name, cuda.total_bytes(number), uuid))
        apart = [
            (a, b)
            for a in numbers
            for b in numbers
            if a != b and not cuda.can_access_peer(a, b)
        ]
    return HostGpus(
        driver=driver_version(Path("/proc/driver/nvidia/version")),
        torch=str(torch.__version__),
        cuda=torch.version.cuda or torch.version.hip or "",
        error="" if devices else _why_not(),
        devices=tuple(devices),
        apart=tuple(apart),
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


def judge_peer_access(gpus: HostGpus) -> Finding:
    """Check that GPUs of one host can read each other's memory."""
    check = "peer access"
    if len(gpus.devices) < 2:
        return Finding(check, Severity.OK, "no two GPUs on this host")
    if not gpus.apart:
        found = f"each of {len(gpus.devices)} GPUs reads the others' memory"
        return Finding(check, Severity.OK, found)
    pairs = ", ".join(f"{a} of {b}" for a, b in gpus.apart[:6])
    more = " ..." if len(gpus.apart) > 6 else ""
    return Finding(
        check,
        Severity.WARN,
        f"these GPUs cannot read the memory of others: {pairs}{more}; their messages "
        "go through the host's memory",
        "`nvidia-smi topo -m` shows how they are connected; PCIe access control "
        "(ACS, IOMMU) in the BIOS often forbids it; put stages that talk side by side",
    )


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


_DEFAULT_CONNECTIONS: Final = 8
_MOST_CONNECTIONS: Final = 32  # CUDA C++ programming guide, "Environment variables"


@dataclass(frozen=True, slots=True)
class CudaSettings:
    """Environment variables of CUDA; empty if they are not set.

    Args:
        module_loading: CUDA_MODULE_LOADING.
        max_connections: CUDA_DEVICE_MAX_CONNECTIONS, the number of hardware queues.
        launch_blocking: CUDA_LAUNCH_BLOCKING.
    """

    module_loading: str
    max_connections: str
    launch_blocking: str


def probe_cuda_settings() -> CudaSettings:
    """Read the environment."""
    return CudaSettings(
        env.CUDA_MODULE_LOADING.text(),
        env.CUDA_DEVICE_MAX_CONNECTIONS.text(),
        env.CUDA_LAUNCH_BLOCKING.text(),
    )


def judge_cuda_settings(settings: CudaSettings, num_gpus: int) -> Finding:
    """Check that kernels need not wait for messages that wait for them.

    Args:
        settings: the environment.
        num_gpus: GPUs of this host; one alone has no messages.
    """
    faults = [
        fault
        for fault in (
            _module_loading(settings, num_gpus),
            _connections(settings),
            _launch_blocking(settings),
        )
        if fault is not None
    ]
    if not faults:
        found = "kernels need not wait for messages"
        return Finding("CUDA settings", Severity.OK, found, numbers=asdict(settings))
    return Finding(
        "CUDA settings",
        Severity.WARN,
        "; ".join(found for found, _ in faults),
        ", ".join(mend for _, mend in faults),
        asdict(settings),
    )


def _module_loading(settings: CudaSettings, num_gpus: int) -> tuple[str, str] | None:
    name = env.CUDA_MODULE_LOADING.name
    if num_gpus < 2 or settings.module_loading.upper() in ("", "EAGER"):
        return None  # where it is not set, workers over NCCL set it
    return (
        f"{name} is {settings.module_loading}: the first use of a kernel may wait "
        "for the whole device, and so for a posted receive",
        f"unset {name}",
    )


def _connections(settings: CudaSettings) -> tuple[str, str] | None:
    name, text = env.CUDA_DEVICE_MAX_CONNECTIONS.name, settings.max_connections
    if not text:
        return None
    if not text.isdigit() or not 1 <= int(text) <= _MOST_CONNECTIONS:
        return f"{name}={text} is not 1 to {_MOST_CONNECTIONS}", f"unset {name}"
    if int(text) >= _DEFAULT_CONNECTIONS:
        return None
    return (
        f"{name}={text}: with so few hardware queues, lanes wait for each other, and "
        "for posted receives",
        f"unset {name} (it is {_DEFAULT_CONNECTIONS} then)",
    )


def _launch_blocking(settings: CudaSettings) -> tuple[str, str] | None:
    name = env.CUDA_LAUNCH_BLOCKING.name
    if settings.launch_blocking in ("", "0"):
        return None
    return (
        f"{name}={settings.launch_blocking}: each launch waits for its kernel, which "
        "only helps to find errors",
        f"unset {name}",
    )
