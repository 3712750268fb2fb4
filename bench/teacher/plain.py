"""The same step without a pipeline: data parallelism, and compute alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.teacher.models import Case, distill, sgd


def ddp_step(case: Case, rank: int, num_workers: int) -> Callable[[], None]:
    """Each worker has both nets whole, and a part of the batch in as many microbatches.

    Args:
        case: the nets and the batch.
        rank: of this worker.
        num_workers: that share the batch.
    """
    nets = case.nets()
    teacher, student = nets["teacher"], DistributedDataParallel(nets["student"])
    optimizer = sgd(student.parameters())
    x, targets = (part.chunk(num_workers)[rank] for part in case.batch())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            soft = teacher(x)
        distill(student(x), targets, soft).backward()
        optimizer.step()

    return step


def bound_step(case: Case, rank: int, num_workers: int) -> Callable[[], None]:
    """All workers computing their own stages at once, with no message and no wait.

    Args:
        case: the nets and the batch.
        rank: whose stages: the same share of both nets.
        num_workers: stages of each net.
    """
    nets = case.nets()
    teacher, student = (_stage(nets[name], rank, num_workers) for name in nets)
    optimizer = sgd(student.parameters())
    x, targets = case.batch()
    parts = x.chunk(case.num_microbatches)
    soft = [torch.randn_like(part) for part in parts]
    is_last = rank == num_workers - 1

    def step() -> None:
        for part in parts:
            with torch.no_grad():
                teacher(part)
        for part, other in zip(parts, soft, strict=True):
            leaf = part.detach().requires_grad_(rank > 0)
            out = student(leaf)
            if is_last:
                (distill(out, targets, other) / len(parts)).backward()
            else:
                out.backward(torch.ones_like(out))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _stage(net: nn.Sequential, rank: int, num_workers: int) -> nn.Sequential:
    each = len(net) // num_workers
    return nn.Sequential(*list(net)[rank * each : (rank + 1) * each])
