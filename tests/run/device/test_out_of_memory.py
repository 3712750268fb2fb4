"""A stage that has no memory left is named, with what was expected and what helps."""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket import env
from hocket.core.costs import Costs, StageCost
from hocket.core.op import Kind, Op
from hocket.core.schedule import Schedule
from hocket.env import ExitCode
from hocket.errors import NoMemoryError
from hocket.run.cluster.doctor.nvidia_smi import GpuProcess, GpuState
from hocket.run.cluster.world import join_world
from hocket.run.device.memory import MemoryWatch, explain_start, is_out_of_memory
from hocket.run.diagnostics.failure import worker_error
from hocket.schedules import make_schedule
from tests.run.support.forked import mark_fault, run_forked
from tests.run.support.started import started

WIDTH: Final = 4
INNER: Final = 8192
SMALL: Final = 8  # samples of a batch that fits
LARGE: Final = (
    8192  # ... and of one that does not: 2048 * INNER * 4 bytes per microbatch
)
SPARE_BYTES: Final = 32 << 20

Batch = tuple[Tensor, Tensor]


def make_batch(num_samples: int) -> Batch:
    """Random vectors."""
    rng = torch.Generator().manual_seed(num_samples)
    x = torch.randn(num_samples, WIDTH, generator=rng)
    return x, torch.randn(num_samples, WIDTH, generator=rng)


def make_model() -> nn.Module:
    """A small layer, and two around many hidden values, which make the second stage."""
    torch.manual_seed(0)
    inside = nn.Sequential(nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), inside)


def train(folder: str, evaluates: bool) -> list[float]:
    """Two small steps, then a large batch, for which the last worker has no memory."""
    torch.set_num_threads(1)
    with started(
        make_model(),
        F.mse_loss,
        (lambda parameters: torch.optim.SGD(parameters, lr=1e-3)),
        make_batch(SMALL),
        num_microbatches=4,
        cut=["1.0"],
        run_dir=folder,
    ) as pipeline:
        small = [make_batch(SMALL) for _ in range(2)]
        losses = [result.loss for result in pipeline.train(small)]
        if evaluates:
            pipeline.evaluate(_large(folder))
        losses += [result.loss for result in pipeline.train(_large(folder))]
    return losses


def _large(folder: str) -> Iterator[Batch]:
    if env.RANK.integer() == 1:
        _starve()
        mark_fault(Path(folder), 1)
    yield make_batch(LARGE)


def _starve() -> None:
    """From now on, this process can take only a little more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


TIMEOUT_S: Final = 3.0
BUSY_S: Final = 20.0

SIZE: Final = r"[\d.,]+ ([KMG]i)?B"
PARTS: Final = ", ".join(
    f"{name} {SIZE}"
    for name in ("weights", "gradients", "optimizer", "activations", "messages")
)
MESSAGE: Final = (
    rf"predicted peak of this device: {SIZE} \({PARTS}\)\. actual peak so far: {SIZE} "
    r"\(the whole process, with Python and its libraries\)\. What helps: "
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("evaluates", [False, True])
def test_the_others_stop_and_the_report_says_why(
    tmp_path: Path, evaluates: bool
) -> None:
    """The last worker may take 32 MiB more, and its first forward needs 64."""
    outcome = run_forked(
        f"{__name__}:train",
        str(tmp_path),
        evaluates,
        folder=tmp_path,
        timeout_s=TIMEOUT_S,
        limit_s=TIMEOUT_S + BUSY_S,
    )

    assert not outcome.hung
    assert max(outcome.after_s.values()) < TIMEOUT_S + BUSY_S
    assert outcome.codes == {0: ExitCode.HANG, 1: ExitCode.WORKER}
    first, rest = str(
        worker_error(list(outcome.reports.values()), Path("folder"))
    ).split("\nafter that:\n")
    step, op = (0, "eval 1F0") if evaluates else (2, "1F0")
    assert first.startswith(
        f"rank 1 raised NoMemoryError at step {step} in {op}: stage 1 found no memory "
        f"for 1F0 of step {step}, on device 1 (rank 1, cpu): "
    )
    assert "you tried to allocate 67108864 bytes" in first
    assert re.search(MESSAGE, first, re.IGNORECASE)
    assert rest.startswith("  rank 0 gave up at step ")


def test_advice_has_numbers() -> None:
    """The error names what recomputing would need where it is less, and only there."""
    gpipe = make_schedule("gpipe", num_devices=1, num_microbatches=4)
    cost = StageCost(1.0, 1.0, 1.0, activation_bytes=2**20)
    whole = _reported(gpipe, cost)
    again = _reported(gpipe, replace(cost, recomputes=True))

    assert (whole.stage, whole.predicted_bytes) == (0, 4 * 2**20)
    assert whole.actual_bytes > 2**20
    assert 'recompute="all", or "auto" with memory_bytes (predicted peak 1 MiB)' in str(
        whole
    )
    assert "more than 4 microbatches, or a smaller batch" in str(whole)
    assert "recompute" not in str(again).partition("What helps:")[2]


def _reported(schedule: Schedule, cost: StageCost) -> NoMemoryError:
    watch = MemoryWatch(schedule, Costs((cost,)), join_world(), 0)
    op = Op(Kind.FORWARD, 0, 1)
    watch.on_error(op, 3, ValueError("something else"))
    with pytest.raises(
        NoMemoryError, match="stage 0 found no memory for 0F1 of step 3"
    ):
        watch.on_error(op, 3, MemoryError("no room"))
    with pytest.raises(NoMemoryError) as caught:
        watch.on_error(op, 3, torch.OutOfMemoryError("CUDA out of memory. Tried ..."))
    return caught.value


def test_a_start_names_those_that_hold_the_memory() -> None:
    """Of the worker's own GPU, with the way to end them."""
    held = GpuProcess(4711, "python", 79 * 2**30)
    gpu = GpuState("GPU-1", 1, 80 * 2**30, 2**28, 345, 1980, processes=(held,))
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    found = explain_start(error, 3, torch.device("cuda:1"), [gpu])

    assert str(found) == (
        "rank 3 found no memory on cuda:1 before the first step: CUDA out of memory. "
        "Tried to allocate 2.00 GiB; GPU 1 has 256 MiB of 80 GiB free, the rest is "
        "held by python (process 4711, 79 GiB). What helps: end these processes "
        "(`kill PID`; `nvidia-smi` shows them), or choose other GPUs with "
        "CUDA_VISIBLE_DEVICES; or more GPUs"
    )


def test_a_start_without_memory_is_an_error_of_ours() -> None:
    """The profile is the first that runs the model."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(NoMemoryError, match="rank 0 found no memory on cpu before"):
        started(
            nn.Linear(2, 2),
            loss,
            torch.optim.SGD,
            (torch.zeros(4, 2), torch.zeros(4, 2)),
        )


def test_what_counts_as_no_memory() -> None:
    """The allocator's text, Python's and the system's errors; and nothing else."""
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 60, dtype=torch.uint8)

    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not is_out_of_memory(OSError(errno.ENOSPC, "No space left on device"))
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))
