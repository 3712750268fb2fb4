"""Measures the memory that a worker may use and has used, and explains its end."""

from __future__ import annotations

import errno
import os
import resource
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from hocket import cuda
from hocket.core.costs import Costs
from hocket.core.op import Op
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.core.simulator.memory import PeakBytes, peak_parts
from hocket.draw.quantity import byte_size
from hocket.errors import NoMemoryError, RunError
from hocket.planner.recompute import recomputing
from hocket.run.cluster.doctor.gpu import judge_gpu_memory
from hocket.run.cluster.doctor.nvidia_smi import GpuState
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


# torch reports it by text only, but for the GPU's own allocator.
_TEXTS: Final = ("can't allocate memory", "out of memory", "std::bad_alloc")


@dataclass(eq=False)
class MemoryWatch:
    """Raises an error that a user can act on when an allocation fails.

    Args:
        schedule: the schedule that is played.
        costs: the program's costs.
        world: the job, with this worker's rank and device.
        device: the device whose lanes this worker plays.
    """

    schedule: Schedule
    costs: Costs
    world: World
    device: int

    def on_error(self, op: Op, step: int, error: Exception) -> None:
        """Explain an op's error if there was no memory; ignore all other errors.

        Raises:
            NoMemoryError: the op failed because there was no memory.
        """
        if not is_out_of_memory(error):
            return
        actual = peak_bytes(self.world.device)
        traceback.clear_frames(error.__traceback__)  # they hold what the op had made
        part = self._predicted(self.costs)
        raise NoMemoryError(
            f"stage {op.stage} found no memory for {op} of step {step}, on device "
            f"{self.device} (rank {self.world.rank}, {self.world.device}): "
            f"{_first_line(error)}. Predicted peak of this device: {_text(part)}. "
            f"Actual peak so far: {byte_size(actual)}{self._whose()}. "
            f"What helps: {self._advice(part)}",
            stage=op.stage,
            predicted_bytes=part.total_bytes,
            actual_bytes=actual,
        ) from error

    def _predicted(self, costs: Costs) -> PeakBytes:
        return peak_parts(simulate(self.schedule, costs), costs)[self.device]

    def _whose(self) -> str:
        if self.world.device.type == "cuda":
            return ""
        return " (the whole process, with Python and its libraries)"

    def _advice(self, part: PeakBytes) -> str:
        program = self.schedule.program
        hints = []
        least = self._predicted(recomputing("all", self.schedule, self.costs))
        if least.total_bytes < part.total_bytes:
            hints.append(
                'recompute="all", or "auto" with memory_bytes '
                f"(predicted peak {byte_size(least.total_bytes)})"
            )
        most = program.num_microbatches_of(0)
        hints += [
            f"more than {most} microbatches, or a smaller batch",
            f"more than {program.num_devices} devices per replica",
        ]
        return "; ".join(hints)


def explain_start(
    error: Exception, rank: int, device: torch.device, gpus: Sequence[GpuState]
) -> NoMemoryError:
    """Explain that a device had no memory for a pipeline's start.

    Args:
        error: the error of the allocation.
        rank: the worker's rank.
        device: the worker's device.
        gpus: the state of that device, if it is a GPU.
    """
    whose = "it is the memory of the host that is full"
    helps = "fewer workers on this host, or a smaller batch"
    if device.type == "cuda":
        found = judge_gpu_memory(gpus)
        whose = found.found
        helps = f"{found.mend or 'more microbatches, or a smaller batch'}; or more GPUs"
    return NoMemoryError(
        f"rank {rank} found no memory on {device} before the first step: "
        f"{_first_line(error)}; {whose}. What helps: {helps}",
        stage=None,
        predicted_bytes=None,
        actual_bytes=peak_bytes(device),
    )


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an exception means that there is no memory left."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error)
    return isinstance(error, RuntimeError) and any(part in text for part in _TEXTS)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")


def _text(part: PeakBytes) -> str:
    return (
        f"{byte_size(part.total_bytes)} (weights {byte_size(part.weight_bytes)}, "
        f"gradients {byte_size(part.gradient_bytes)}, optimizer "
        f"{byte_size(part.optimizer_bytes)}, activations "
        f"{byte_size(part.activation_bytes)}, messages {byte_size(part.message_bytes)})"
    )
