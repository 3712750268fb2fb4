"""The same step done by torch.distributed.pipelining, and by nothing but compute."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed import pipelining

from bench.models import Case

_SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved-1f1b": pipelining.ScheduleInterleaved1F1B,
    "looped-bfs": pipelining.ScheduleLoopedBFS,
}
_LOOPED = {"interleaved-1f1b", "looped-bfs"}


def torch_step(
    case: Case,
    model: nn.Sequential,
    boundaries: tuple[int, ...],
    schedule: str,
    rank: int,
) -> Callable[[], None]:
    """One training step of torch's pipeline, with the cut that hocket uses.

    Args:
        case: the batch and the loss.
        model: whole; each worker keeps its stages.
        boundaries: the children with which stages 1, 2, ... begin.
        schedule: by hocket's name.
        rank: of this worker, out of two.
    """
    device = torch.device("cpu")
    ends = [0, *boundaries, len(model)]
    num_stages = len(ends) - 1
    own = [s for s in range(num_stages) if s % 2 == rank]
    stages = [
        pipelining.PipelineStage(model[ends[s] : ends[s + 1]], s, num_stages, device)
        for s in own
    ]
    kind = _SCHEDULES[schedule]
    runner = kind(
        stages if schedule in _LOOPED else stages[0],
        n_microbatches=case.num_microbatches,
        loss_fn=case.loss,
    )
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1e-4)
    x, targets = case.batch()

    def step() -> None:
        losses: list[Tensor] = []
        args = (x,) if rank == 0 else ()
        if (num_stages - 1) % 2 == rank:
            runner.step(*args, target=targets, losses=losses)
        else:
            runner.step(*args)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def bound_step(
    case: Case,
    model: nn.Sequential,
    boundaries: tuple[int, ...],
    rank: int,
) -> Callable[[], None]:
    """Both workers' compute at the same time, without messages and without bubble.

    Each worker runs forward and backward of its own stages for every microbatch, on
    inputs that are there from the start.
    """
    ends = [0, *boundaries, len(model)]
    num_stages = len(ends) - 1
    own = [model[ends[s] : ends[s + 1]] for s in range(num_stages) if s % 2 == rank]
    is_last = (num_stages - 1) % 2 == rank
    optimizer = torch.optim.SGD([p for part in own for p in part.parameters()], lr=1e-4)
    _, targets = case.batch()
    parts = _inputs(case, model, ends, rank)
    target_parts = targets.chunk(case.num_microbatches)

    def step() -> None:
        for m in range(case.num_microbatches):
            for i, part in enumerate(own):
                leaf = parts[i][m].detach()
                if ends[0] != 0 or not (rank == 0 and i == 0):
                    leaf.requires_grad_()
                out = part(leaf)
                if is_last and i == len(own) - 1:
                    (case.loss(out, target_parts[m]) / case.num_microbatches).backward()
                else:
                    out.backward(torch.ones_like(out))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _inputs(
    case: Case, model: nn.Sequential, ends: list[int], rank: int
) -> list[tuple[Tensor, ...]]:
    """What each of this worker's stages would receive."""
    x, _ = case.batch()
    inputs = []
    with torch.no_grad():
        for s in range(len(ends) - 1):
            if s % 2 == rank:
                inputs.append(x.chunk(case.num_microbatches))
            x = model[ends[s] : ends[s + 1]](x)
    return inputs
