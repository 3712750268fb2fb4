"""Reads the memory, clocks and processes of GPUs from `nvidia-smi`.

It queries the driver and makes no CUDA context, which would itself take memory.

    --query-gpu=uuid,index,memory...       ──▶ one line per GPU
    --query-gpu=uuid,clocks_event_reasons  ──▶ one line per GPU ──▶ GpuState
    --query-compute-apps=gpu_uuid,pid,...  ──▶ one line per process
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Final

_MIB: Final = 2**20
_TIMEOUT_S: Final = 20.0  # without persistence mode, the driver starts every GPU first
_FORMAT: Final = "--format=csv,noheader,nounits"  # memory in MiB, clocks in MHz
_STATE: Final = "uuid,index,memory.total,memory.free,clocks.sm,clocks.max.sm"
_PROCESS: Final = "gpu_uuid,pid,process_name,used_memory"
# The new name, and that of drivers before 535. An unknown name fails the whole query.
_CLOCK_LIMITS: Final = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")


class ClockLimit(IntFlag):
    """A reason why a GPU's clocks are lower than they could be.

    Source: NVML API reference, nvmlClocksEventReasons. Those of an idle GPU, of its
    power limit and of displays are left out: they are no faults.
    """

    NONE = 0
    USER = 0x2  # `nvidia-smi -ac` or `-lgc`
    HARDWARE = 0x8  # for heat or power
    SOFTWARE_HEAT = 0x20
    HEAT = 0x40
    POWER_BRAKE = 0x80  # the power supply asks for it


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that has memory on a GPU.

    Args:
        pid: its number; that of the host, also in a container.
        name: its program.
        used_bytes: the memory that it holds; 0 if the driver does not say.
    """

    pid: int
    name: str
    used_bytes: int


@dataclass(frozen=True, slots=True)
class GpuState:
    """What `nvidia-smi` reports for one GPU; a number is 0 where it reports none.

    Args:
        uuid: identifies the GPU, also where `CUDA_VISIBLE_DEVICES` changes its index.
        index: its index without `CUDA_VISIBLE_DEVICES`.
        total_bytes: its memory.
        free_bytes: the memory that no process holds.
        sm_mhz: the clock of its multiprocessors now.
        max_sm_mhz: the highest clock that they can have.
        limits: what lowers the clocks now.
        processes: those that hold memory.
    """

    uuid: str
    index: int
    total_bytes: int
    free_bytes: int
    sm_mhz: int
    max_sm_mhz: int
    limits: ClockLimit = ClockLimit.NONE
    processes: tuple[GpuProcess, ...] = ()


def probe_gpu_states() -> tuple[GpuState, ...]:
    """Query `nvidia-smi`; no states where it is missing or fails."""
    states = _query(f"--query-gpu={_STATE}")
    if not states:
        return ()
    answers = (_query(f"--query-gpu=uuid,{name}") for name in _CLOCK_LIMITS)
    limits = next(filter(None, answers), "")
    return parse_gpu_states(states, limits, _query(f"--query-compute-apps={_PROCESS}"))


def parse_gpu_states(states: str, limits: str, processes: str) -> tuple[GpuState, ...]:
    """Parse the output of the three queries; lines of another form are left out.

    Args:
        states: uuid, index, total and free memory, current and highest clock.
        limits: uuid and the bits of `ClockLimit`; empty if unknown.
        processes: uuid, process, name and memory; empty if unknown.
    """
    bits = {row[0]: row[1] for row in _rows(limits, 2)}
    held: dict[str, list[GpuProcess]] = {}
    for uuid, pid, *name, used in _rows(processes, 4):  # a name may have commas
        one = GpuProcess(_number(pid), ", ".join(name), _number(used) * _MIB)
        held.setdefault(uuid, []).append(one)
    return tuple(
        GpuState(
            uuid=uuid,
            index=_number(index),
            total_bytes=_number(total) * _MIB,
            free_bytes=_number(free) * _MIB,
            sm_mhz=_number(clock),
            max_sm_mhz=_number(highest),
            limits=_limits(bits.get(uuid, "")),
            processes=tuple(held.get(uuid, ())),
        )
        for uuid, index, total, free, clock, highest, *_ in _rows(states, 6)
    )


def _query(question: str) -> str:
    """Return the answer; empty if there is none."""
    command = ["nvidia-smi", question, _FORMAT]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _rows(text: str, num_fields: int) -> Iterator[Sequence[str]]:
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) >= num_fields:
            yield fields


def _number(text: str) -> int:
    """Return a whole number; 0 for `[N/A]`, `[Not Supported]` and the like."""
    return int(text) if text.isdigit() else 0


def _limits(bits: str) -> ClockLimit:
    try:
        number = int(bits, 16)
    except ValueError:  # [N/A]
        number = 0
    return ClockLimit(number & sum(ClockLimit))
