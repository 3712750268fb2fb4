"""What `hocket.share` was asked for, checked before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch

from hocket import cuda, env
from hocket.errors import ConfigError
from hocket.nearest import nearest
from hocket.sharing.policy import WITH_SHARES, WITH_SLOWDOWNS, Mode
from hocket.sharing.running.job import Job, check_jobs


@dataclass(frozen=True, slots=True)
class Request:
    """The checked arguments of `share`, with defaults filled in.

    Args:
        jobs: the jobs.
        budget_bytes: the most that all of them may hold; inf for no limit.
        mode: the mode; turns instead of auto where the allocator requires it.
        num_iterations: see `share`.
        device: the device.
        processes: see `share`.
        notes: lines for the report.
    """

    jobs: Sequence[Job]
    budget_bytes: float
    mode: Mode
    num_iterations: int | None
    device: torch.device
    processes: bool
    notes: Sequence[str]


def read_request(
    jobs: Iterable[Job],
    *,
    memory_bytes: int | None = None,
    mode: str = "auto",
    num_iterations: int | None = None,
    device: str | torch.device | None = None,
    processes: bool = False,
) -> Request:
    """Check the arguments of `share`; starts nothing, and writes nothing.

    Raises:
        ConfigError: see `share`.
    """
    found = _listed(jobs)
    check_jobs(found)
    wanted, notes = _mode_of(mode), list[str]()
    refuse_without_effect(found, wanted)
    _check_numbers(memory_bytes, num_iterations)
    torch_device = _device_of(device)
    is_gpu = torch_device.type == "cuda"
    if is_gpu and processes:
        notes.append(process_note(Path(env.MPS_PIPE.text())))
    elif is_gpu:
        wanted = allowed_mode(wanted, cuda.allocator_backend(), notes)
    return Request(
        found,
        inf if memory_bytes is None else memory_bytes,
        wanted,
        num_iterations,
        torch_device,
        processes,
        notes,
    )


def _listed(jobs: Iterable[Job]) -> list[Job]:
    if not isinstance(jobs, Iterable):
        raise ConfigError(
            f"jobs is a {type(jobs).__name__} and no list of jobs: give "
            "hocket.share([hocket.Job(...), ...])"
        )
    found = list(jobs)
    for i, job in enumerate(found):
        if not isinstance(job, Job):
            raise ConfigError(
                f"jobs[{i}] is a {type(job).__name__} and no job: give "
                "hocket.Job(name, make), where make returns a step and its batches"
            )
    return found


def _check_numbers(memory_bytes: object, num_iterations: object) -> None:
    if memory_bytes is not None and not _is_above_0(memory_bytes, int | float):
        raise ConfigError(
            f"memory_bytes={memory_bytes!r} is no number of bytes above 0: give one, "
            "such as 20 * 2**30 for 20 GiB, or None for no limit"
        )
    if num_iterations is not None and not _is_above_0(num_iterations, int):
        raise ConfigError(
            f"num_iterations is {num_iterations!r}: give a whole number, at least 1, "
            "or None for all batches"
        )


def _is_above_0(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and value > 0


def _mode_of(name: str) -> Mode:
    names = [mode.value for mode in Mode]
    if name not in names:
        raise ConfigError(f"mode {name!r} is unknown: {nearest(str(name), names)}")
    return Mode(name)


def _device_of(device: str | torch.device | None) -> torch.device:
    """Return the device, with its number.

    Raises:
        ConfigError: there is none of this name.
    """
    num_gpus = cuda.num_devices() if cuda.is_available() else 0
    if device is None:
        return torch.device("cuda", 0) if num_gpus else torch.device("cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise _no_device(device, num_gpus) from None
    if found.type == "cpu":
        return torch.device("cpu")
    number = found.index or 0
    if found.type != "cuda" or number >= num_gpus:
        raise _no_device(device, num_gpus)
    return torch.device("cuda", number)


def _no_device(device: object, num_gpus: int) -> ConfigError:
    return ConfigError(
        f"device {str(device)!r}: jobs share a GPU (cuda, cuda:1) or the CPU (cpu), "
        f"and torch sees {num_gpus} GPUs here; without device= it is the first GPU, "
        "or else the CPU"
    )


def refuse_without_effect(jobs: Sequence[Job], wanted: Mode) -> None:
    """Refuse weights and slowdown limits that the mode ignores.

    Raises:
        ConfigError: says in which modes they have an effect.
    """
    weights = [job.weight for job in jobs]
    if wanted not in WITH_SHARES and len(set(weights)) > 1:
        raise ConfigError(
            f'mode="{wanted.value}" gives the jobs no shares: in lag and tick-tock all '
            "start equally often, and in free no job waits. The weights "
            f"{', '.join(f'{x:g}' for x in weights)} have no effect: use "
            'mode="budget", "turns" or "auto", or give all jobs one weight'
        )
    for job in jobs:
        if wanted not in WITH_SLOWDOWNS and job.max_slowdown < inf:
            raise ConfigError(
                f"job {job.name!r}: max_slowdown={job.max_slowdown:g} has no effect in "
                f'mode="{wanted.value}", which does not look at it: use '
                'mode="budget", "lag", "turns" or "auto", or leave it out'
            )


def allowed_mode(wanted: Mode, backend: str, notes: list[str]) -> Mode:
    """Return the mode that CUDA's allocator allows.

    The native allocator gives memory that a stream has freed to that stream only.

    Args:
        wanted: the mode that was asked for.
        backend: the allocator: native or cudaMallocAsync.
        notes: this function may append a line for the report.

    Raises:
        ConfigError: the mode shares memory, and the allocator does not.
    """
    if backend != cuda.NATIVE_ALLOCATOR or wanted is Mode.TURNS:
        return wanted
    advice = (
        "torch's native allocator keeps freed memory for the stream that freed it, so "
        "jobs on two streams reserve both peaks whatever their order: set "
        f"{env.CUDA_ALLOCATOR.name}=backend:cudaMallocAsync before torch is imported "
        "(`hocket share` does)"
    )
    if wanted in {Mode.LAG, Mode.BUDGET}:
        raise ConfigError(f'mode="{wanted.value}": {advice}, or use mode="turns"')
    notes.append(f"note: {advice}")
    return Mode.TURNS if wanted is Mode.AUTO else wanted


def process_note(mps_pipe: Path) -> str:
    """Return what the report says about processes that share a GPU.

    Args:
        mps_pipe: the folder in which the control daemon of MPS listens.
    """
    if (mps_pipe / "control").exists():
        return (
            f"note: processes share the GPU through MPS ({mps_pipe}): kernels of "
            "several run at the same time, and a fatal fault of one ends all"
        )
    return (
        "note: processes share the GPU in slices of time, and their kernels do not "
        "overlap: a running MPS daemon (nvidia-cuda-mps-control -d) lets them"
    )
