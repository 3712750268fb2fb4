"""Checks that GPUs have free memory, and clocks that nothing lowers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

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
