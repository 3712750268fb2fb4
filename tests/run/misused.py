"""What the workers of the input tests do: give the pipeline what it should refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import hocket
from hocket.errors import HocketError
from hocket.plan.op import Kind, Op
from hocket.plan.program import Program
from hocket.plan.schedule import Lane, Schedule
from hocket.run.world import World, join_world
from hocket.schedules import make_schedule
from tests.run.failing import Batch, loss, make_batches, make_model, make_pipeline

Told = list[str]  # the error's type and its message; nothing if there was none


def told(action: Callable[[], object]) -> Told:
    """What a user is told by doing something."""
    try:
        action()
    except HocketError as error:
        return [type(error).__name__, str(error)]
    except Exception as error:  # not one of ours
        return [f"!!! {type(error).__name__}", str(error)]
    return []


def bad_settings(folder: str) -> dict[str, Told]:
    """Pipelines that cannot be made, one after the other in one job."""
    torch.set_num_threads(1)
    world = join_world()
    [example] = make_batches(1)

    def made(batch: Any = example, model: Any = None, **settings: Any) -> Told:
        model = make_model() if model is None else model
        return told(lambda: make_pipeline(model, batch, folder, world=world, **settings))

    x, y = example
    return {
        "no cut name": made(cut=["7.linear"]),
        "cut order": made(schedule="looped-bfs", cut=["8", "4", "12"]),
        "too few cuts": made(schedule="looped-bfs", cut=["8"]),
        "too few layers": made(model=small(), schedule="looped-bfs"),
        "replicas": made(num_replicas=3),
        "microbatches": made(num_microbatches=0),
        "schedule's name": made(schedule="1f2b"),
        "schedule's constraints": made(
            schedule="interleaved-1f1b", num_microbatches=3
        ),
        "schedule for others": made(
            schedule=make_schedule("1f1b", num_devices=3, num_microbatches=8)
        ),
        "split backward": made(schedule=split_backward()),
        "delays": made(schedule=delayed()),
        "forward-only": made(schedule="forward-only"),
        "small example": made((x[:3], y[:3])),
        "no pair": made({"x": x}),
        "no tensor": made(("x", "y")),
        "different sizes": made((x, y[:5])),
        "loss of samples": made(loss=nn.CrossEntropyLoss(reduction="none")),
        "loss is a number": made(loss=lambda output, targets: 1.0),
        "detached loss": made(loss=lambda out, targets: loss(out.detach(), targets)),
        "None": made(model=nn.Sequential(make_model(), Nothing())),
        "good": made(),
    }


class Nothing(nn.Module):
    """Forgets to return."""

    def forward(self, x: Tensor) -> None:
        """None."""


def small() -> nn.Module:
    """A model of two layers."""
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)).double()


def split_backward() -> Schedule:
    """1F1B with I and W in the place of each B."""
    whole = make_schedule("1f1b", num_devices=2, num_microbatches=4)
    return replace(whole, lanes=tuple(_split(lane) for lane in whole.lanes))


def _split(lane: Lane) -> Lane:
    ops: list[Op] = []
    for op in lane.ops:
        if op.kind is Kind.BACKWARD:
            ops += [replace(op, kind=Kind.BACKWARD_INPUT)]
            ops += [replace(op, kind=Kind.BACKWARD_WEIGHT)]
        else:
            ops += [op]
    return replace(lane, ops=tuple(ops))


def delayed() -> Schedule:
    """1F1B of a program whose first stage asks for weights of one step before."""
    whole = make_schedule("1f1b", num_devices=2, num_microbatches=4)
    return replace(whole, program=Program.chain([0, 1], 4, delays=[1, 0]))
