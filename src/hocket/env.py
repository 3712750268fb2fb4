"""Environment variables that hocket reads and writes, and its exit codes.

No other file reads or writes the environment. Three groups of variables:

    the user's    HOCKET_TIMEOUT_S, OMP_NUM_THREADS, HOCKET_KEEP_FREED_MEMORY, ...
    torchrun's    RANK, WORLD_SIZE, ..., TORCHELASTIC_RESTART_COUNT
    the launcher's, for the workers it starts itself    HOCKET_JOB_DIR, ...
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from hocket.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MissingPackageError,
    ModelError,
    NonFiniteError,
    PlanError,
    RunError,
    WaitError,
    WorkerError,
)


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable.

    Args:
        name: the name in the shell.
        meaning: the meaning, in one sentence.
        default: the value if it is not set; empty for none.
    """

    name: str
    meaning: str
    default: str = ""

    @property
    def is_set(self) -> bool:
        """Return whether it is set, and not empty."""
        return bool(os.environ.get(self.name))

    def text(self) -> str:
        """Return its value, or the default; an empty value counts as not set."""
        return os.environ.get(self.name) or self.default

    def integer(self) -> int:
        """Return its value as a whole number.

        Raises:
            RunError: the value is no whole number, or there is none.
        """
        try:
            return int(self.text())
        except ValueError:
            raise RunError(
                f"environment variable {self.name}={self.text()!r} must be a whole "
                f"number: {self.meaning}"
            ) from None

    def switch(self) -> bool:
        """Return whether it is 1, and not 0.

        Raises:
            RunError: the value is neither 1 nor 0.
        """
        if self.text() not in ("0", "1"):
            raise RunError(
                f"environment variable {self.name}={self.text()!r} must be 1 or 0: "
                f"{self.meaning}"
            )
        return self.text() == "1"

    def seconds(self) -> float:
        """Return its value as a positive number of seconds.

        Raises:
            RunError: the value is no such number.
        """
        try:
            value = float(self.text())
        except ValueError:
            value = 0.0
        if not 0.0 < value < float("inf"):
            raise RunError(
                f"environment variable {self.name}={self.text()!r} must be a positive "
                f"number of seconds: {self.meaning}"
            )
        return value

    def set_default(self, value: str) -> None:
        """Set it for this process and those it starts, unless the user has."""
        if not self.is_set:
            os.environ[self.name] = value


TIMEOUT_S: Final = Variable(
    "HOCKET_TIMEOUT_S",
    "seconds that a worker waits for another before it gives up",
    "60",
)
THREADS: Final = Variable(
    "OMP_NUM_THREADS",
    "threads per worker; where it is not set, workers that hocket starts share the "
    "cores evenly",
)
KEEP_FREED_MEMORY: Final = Variable(
    "HOCKET_KEEP_FREED_MEMORY",
    "whether workers on CPUs keep the memory that ops free for later ops, instead of "
    "giving it back to the system between them (glibc only); 1, or 0 for no",
    "1",
)
MALLOC: Final = tuple(
    Variable(name, "how glibc's malloc behaves; if any is set, it stays so")
    for name in (
        "MALLOC_TRIM_THRESHOLD_",
        "MALLOC_MMAP_THRESHOLD_",
        "MALLOC_MMAP_MAX_",
        "MALLOC_TOP_PAD_",
        "GLIBC_TUNABLES",
    )
)
KEEP_BUSY: Final = Variable(
    "HOCKET_KEEP_BUSY_PROFILES",
    "whether profiles that were measured beside other programs are kept for the next "
    "start, as others are; 1, or 0 for no",
    "0",
)
DEVICE: Final = Variable(
    "HOCKET_DEVICE",
    "what workers compute on: cpu, or cuda; by default cuda where there is such a "
    "device",
)
BACKEND: Final = Variable(
    "HOCKET_BACKEND",
    "what carries messages: nccl, which needs a GPU for each worker, or gloo, with "
    "which workers on GPUs may share one; by default nccl for GPUs and gloo for CPUs",
)
GLOO_INTERFACE: Final = Variable(
    "GLOO_SOCKET_IFNAME",
    "network interface of gloo; where it is not set, the loopback if all workers are "
    "on one host, else the one that leads to the others",
)
NCCL_INTERFACE: Final = Variable(
    "NCCL_SOCKET_IFNAME",
    "network interface of NCCL; where it is not set, the same as gloo's",
)
NCCL_ERROR_HANDLING: Final = Variable(
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "what torch does when an operation of NCCL fails; where it is not set, 0: hocket "
    "keeps the deadlines itself, and raises",
)
CUDA_MODULE_LOADING: Final = Variable(
    "CUDA_MODULE_LOADING",
    "whether CUDA loads kernels at their first use (LAZY, its default) or when it "
    "starts (EAGER); where it is not set, EAGER for workers over NCCL",
)
CUDA_DEVICE_MAX_CONNECTIONS: Final = Variable(
    "CUDA_DEVICE_MAX_CONNECTIONS", "number of hardware queues of a GPU, 1 to 32"
)

CUDA_ALLOCATOR: Final = Variable(
    "PYTORCH_CUDA_ALLOC_CONF",
    "torch's allocator on GPUs; where it is not set, `hocket share` takes the driver's "
    "own (backend:cudaMallocAsync), in which jobs on several streams share memory",
)
MPS_PIPE: Final = Variable(
    "CUDA_MPS_PIPE_DIRECTORY",
    "folder in which MPS listens, if its daemon runs; processes that share a GPU then "
    "use it",
    "/tmp/nvidia-mps",
)
RANK: Final = Variable("RANK", "this worker's rank; torchrun sets it")
WORLD_SIZE: Final = Variable("WORLD_SIZE", "number of workers; torchrun sets it")
LOCAL_RANK: Final = Variable(
    "LOCAL_RANK", "this worker's rank on its host, and its GPU's number", "0"
)
LOCAL_WORLD_SIZE: Final = Variable(
    "LOCAL_WORLD_SIZE", "number of workers on this host", "1"
)
MASTER_ADDR: Final = Variable(
    "MASTER_ADDR", "host of the store in which workers meet; torchrun sets it"
)
MASTER_PORT: Final = Variable(
    "MASTER_PORT", "port of the store in which workers meet; torchrun sets it"
)
RUN_ID: Final = Variable(
    "TORCHELASTIC_RUN_ID", "name of the torchrun job; torchrun sets it", "job"
)
ATTEMPT: Final = Variable(
    "TORCHELASTIC_RESTART_COUNT",
    "how often the workers were started again; torchrun sets it",
    "0",
)
AGENT_STORE: Final = Variable(
    "TORCHELASTIC_USE_AGENT_STORE",
    "whether torchrun itself holds the store, and not rank 0; torchrun sets it",
    "False",
)
ERROR_FILE: Final = Variable(
    "TORCHELASTIC_ERROR_FILE",
    "where torchrun looks for a worker's failure, for its summary; torchrun sets it",
)

JOB_DIR: Final = Variable(
    "HOCKET_JOB_DIR",
    "folder (mode 0700) in which workers that hocket started on one host find each "
    "other and leave their reports; the launcher sets it",
)
LAUNCHER_PID: Final = Variable(
    "HOCKET_LAUNCHER_PID",
    "process that started this worker; without it the worker ends; the launcher sets "
    "it",
)
SHARED_JOB: Final = Variable(
    "HOCKET_SHARED_JOB",
    "the job that this process runs for `hocket share --processes`, which sets it",
)


class ExitCode(IntEnum):
    """The exit codes of workers and of the command line."""

    OK = 0
    USAGE = 2  # a recipe, a setting, data or a model that is not valid
    PLAN = 3  # what was asked for cannot be planned
    UNFIT = 4  # `hocket doctor` found what must be mended first
    NON_FINITE = 5  # a loss that is not a number
    HANG = 6  # a worker waited for another until its timeout
    WORKER = 7  # a worker failed in any other way
    CHECKPOINT = 8  # a checkpoint that is missing, damaged or of another model
    INTERRUPTED = 130  # Ctrl-C: 128 + SIGINT
    TERMINATED = 143  # 128 + SIGTERM


def with_variables(values: Mapping[Variable, str]) -> dict[str, str]:
    """Return this process's environment with other values, for a process it starts."""
    own = {variable.name: value for variable, value in values.items()}
    return {**os.environ, **own}


_CODES: Final = (
    (ConfigError, ExitCode.USAGE),
    (DataError, ExitCode.USAGE),
    (MissingPackageError, ExitCode.USAGE),
    (ModelError, ExitCode.USAGE),
    (PlanError, ExitCode.PLAN),
    (CheckpointError, ExitCode.CHECKPOINT),
    (NonFiniteError, ExitCode.NON_FINITE),
    (WaitError, ExitCode.HANG),
    (KeyboardInterrupt, ExitCode.INTERRUPTED),
)


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code of a process that this error ends.

    >>> exit_code_of(WaitError("rank 0 waited for rank 1")).name
    'HANG'
    """
    if isinstance(error, WorkerError):
        return ExitCode(error.exit_code)
    codes = (code for kind, code in _CODES if isinstance(error, kind))
    return next(codes, ExitCode.WORKER)
