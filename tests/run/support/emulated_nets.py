"""Small nets, losses and data for emulated programs and loops written by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.core.program import Net, Program, Stage
from tests.run.support.plainly import classified

SGD: Final = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW: Final = partial(torch.optim.AdamW, lr=1e-2)
CUT: Final = {"student": ["2"], "teacher": ["2"]}
TEACHER_FIRST: Final = ((0, 1), (2, 3), (1, 3))


def chain_model(seed: int, width: int = 4) -> nn.Sequential:
    """Make two linear layers with a batch norm between; "2" is the second layer."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 3)
    ).double()


def batches(num: int, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Draw inputs and classes."""
    return classified([size] * num, 4, 3, seed=5)


def distill(output: Tensor, targets: Tensor, teacher: Tensor) -> dict[str, Tensor]:
    """Add half the squared distance from the teacher's output to the cross entropy."""
    hard = F.cross_entropy(output, targets)
    soft = F.mse_loss(output, teacher.detach())
    return {"loss": hard + 0.5 * soft, "soft": soft}


def contrast(output: Tensor, targets: Tensor, other: Tensor) -> Tensor:
    """Compare each row of the output with all rows of the other net's output."""
    del targets
    return F.cross_entropy(output @ other.T, torch.arange(len(output)))


def two_nets(
    teacher: Callable[[int], Stage],
    num_microbatches: tuple[int, int],
    *,
    batch_loss: bool = False,
    num_replicas: int = 1,
    reads_batch: bool = False,
) -> Program:
    """Make a program of a teacher (stages 0, 1) and a student (2, 3) on two devices."""
    return Program(
        (
            Net("teacher", num_microbatches[0]),
            Net("student", num_microbatches[1], batch_loss=batch_loss),
        ),
        (teacher(0), teacher(1), Stage("student", 0), Stage("student", 1)),
        TEACHER_FIRST,
        num_replicas=num_replicas,
        whole_batch_flows=frozenset([(1, 3)] if reads_batch else []),
    )


def assert_close(found: nn.Module, expected: nn.Module) -> None:
    """Compare all weights and buffers, to rounding."""
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(
            found.state_dict()[name], value, rtol=1e-10, atol=1e-12, msg=name
        )
