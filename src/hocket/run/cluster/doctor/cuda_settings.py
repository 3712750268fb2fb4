"""Checks the environment variables that change how CUDA loads and runs kernels.

A posted receive is a kernel that runs until its message arrives. Whatever waits for it
without need may wait for ever:

    stream of messages   │ receive 1B0's gradient ........................
    stream of the lane   │ 1F1, the first use of a kernel ── loading it waits
                                                             for the receive
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

from hocket import env
from hocket.run.cluster.doctor.finding import Finding, Severity

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
