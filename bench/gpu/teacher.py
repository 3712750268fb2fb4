"""A teacher and its student on an accelerator: first that it is exact, then how fast.

Two workers share one GPU (gloo, and messages staged through pinned memory), or have one
each (NCCL); one worker alone runs the teacher between the student's ops, and in a
second lane: a stream of lower priority.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from bench.gpu.checked import (
    TOLERANCE,
    Checks,
    Row,
    Setting,
    exactly,
    on_two_workers,
    relative_error,
    seconds_of,
)
from bench.measure import spread
from bench.models import transformer
from hocket.run.cluster.world import World, join_world, single_process_world
from hocket.run.data.batch import split_batch

NUM_CHECKED_STEPS: Final = 10
NUM_ROUNDS: Final = 10
STEPS_IN_TURN: Final = 5
FULL: Final = (1024, 64, 256)  # width, samples, tokens
SMALL: Final = (32, 8, 8)
NUM_MICROBATCHES: Final = 4
DELAYS: Final = (None, 0, 1)  # None: frozen


def two_workers(setting: Setting) -> Row:
    """The student's stages on two workers, the teacher's beside them."""
    return on_two_workers("bench.gpu.teacher:worker")


def worker(backend: str) -> list[Row]:
    """What each of two workers does."""
    exactly()
    world = join_world(backend=backend)
    return [check(delay, world, own_lane=False) for delay in DELAYS]


def one_worker(setting: Setting) -> Row:
    """The teacher in the student's lane, and in one of its own."""
    exactly()
    world = single_process_world(setting.device)
    both = [(delay, lane) for delay in DELAYS for lane in (False, True)]
    rows = [check(delay, world, own_lane=lane) for delay, lane in both]
    return {"rows": rows, "holds": all(row["holds"] for row in rows)}


def check(delay: int | None, world: World, *, own_lane: bool) -> Row:
    """Weights in float64 beside those of a plain loop on the same device."""
    teacher, student = nets(8)
    loop = teacher.to(world.device), copy.deepcopy(student).to(world.device)
    rng = torch.Generator().manual_seed(2)
    batches = [
        (torch.randn(10, 4, 8, generator=rng, dtype=torch.float64), torch.zeros(10))
        for _ in range(NUM_CHECKED_STEPS)
    ]
    train_plainly(*copy.deepcopy(loop), batches, delay, loop[1])
    with make_pipeline(
        teacher.cpu(), student, batches[0], delay, world, own_lane=own_lane
    ) as pipeline:
        for _ in pipeline.train(batches):
            pass
        found = pipeline.state_dict()
    expected = loop[1].state_dict()
    worst = max(relative_error(found[name], value) for name, value in expected.items())
    return {
        "delay": delay,
        "own_lane": own_lane,
        "worst_error": worst,
        "holds": worst <= TOLERANCE,
    }


def train_plainly(
    teacher: nn.Module,
    student: nn.Module,
    batches: list[Any],
    delay: int | None,
    into: nn.Module,
) -> None:
    """Train one microbatch after the other; batch k reads the teacher k - delay.

    Args:
        teacher: as it is at the start.
        student: trained.
        batches: one per step.
        delay: of the teacher's weights; None for a frozen teacher.
        into: gets the student's weights.
    """
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    versions = [copy.deepcopy(teacher)]
    for step, batch in enumerate(batches):
        read = versions[max(0, step - (delay or 0))] if delay is not None else teacher
        for part in split_batch(batch, NUM_MICROBATCHES):
            x = part.leaves[0].to(next(student.parameters()).device)
            with torch.no_grad():
                soft = read(x)
            loss = F.mse_loss(student(x), soft) * part.num_samples / len(batch[0])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if delay is not None:
            versions.append(copy.deepcopy(versions[-1]))
            for own, new in zip(
                versions[-1].parameters(), student.parameters(), strict=True
            ):
                own.data.mul_(0.9).add_(new.detach(), alpha=0.1)
    into.load_state_dict(student.state_dict())


def make_pipeline(
    teacher: nn.Module,
    student: nn.Module,
    batch: Any,
    delay: int | None,
    world: World,
    *,
    own_lane: bool,
) -> hocket.Pipeline:
    """A pipeline whose loss reads the teacher's outputs of the same samples."""
    update = None if delay is None else hocket.Momentum(0.9)
    return hocket.Pipeline(
        student,
        distance,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        example=batch,
        schedule="1f1b",
        num_microbatches=NUM_MICROBATCHES,
        teachers={
            "teacher": hocket.Teacher(teacher, update=update, delay=delay, mode="eval")
        },
        teacher_lane=own_lane,
        world=world,
    )


def distance(output: Tensor, targets: Tensor, teachers: Any) -> Tensor:
    """Mean squared distance from the teacher's outputs."""
    del targets
    return F.mse_loss(output, teachers["teacher"].own)


def nets(width: int, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    """A teacher and a student of equal layers, with other weights."""
    torch.manual_seed(1)
    return transformer(width).to(dtype).eval(), transformer(width).to(dtype)


def measured(contestant: str, setting: Setting) -> Row:
    """Seconds of a step with a frozen teacher."""
    exactly()
    width, num_samples, num_tokens = FULL if setting.is_full else SMALL
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(num_samples, num_tokens, width, generator=rng)
    batch = x.to(setting.device), torch.zeros(num_samples, device=setting.device)
    teacher, student = (x.to(setting.device) for x in nets(width, torch.float32))
    num_rounds = setting.size(NUM_ROUNDS, 2)
    if contestant == "plain loop":
        optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
        plain = partial(plain_steps, teacher, student, optimizer, batch)
        return {"step": _spread(plain, num_rounds, setting)}
    world = single_process_world(setting.device)
    own_lane = contestant == "second lane"
    with make_pipeline(
        teacher, student, batch, None, world, own_lane=own_lane
    ) as pipeline:
        batches = [batch] * STEPS_IN_TURN
        step = _spread(lambda: [*pipeline.train(batches)], num_rounds, setting)
        predicted_ms = round(pipeline.predicted.makespan_s * 1e3, 4)
    return {"step": step, "predicted_ms": predicted_ms}


def plain_steps(
    teacher: nn.Module, student: nn.Module, optimizer: Any, batch: Any
) -> None:
    """Some steps as a loop writes them, over as many microbatches."""
    parts = split_batch(batch, NUM_MICROBATCHES)
    for _ in range(STEPS_IN_TURN):
        for part in parts:
            with torch.no_grad():
                soft = teacher(*part.leaves)
            (F.mse_loss(student(*part.leaves), soft) / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _spread(
    steps: Callable[[], object], num_rounds: int, setting: Setting
) -> dict[str, float]:
    """Of the seconds of a step in each round, after two to warm up."""
    seconds = [seconds_of(setting.device, steps) for _ in range(2 + num_rounds)]
    return spread([x / STEPS_IN_TURN for x in seconds[2:]])


_CONTESTANTS: Final = ("plain loop", "one lane", "second lane")
TIMED: Final = [f"teacher, {name}" for name in _CONTESTANTS]
CHECKS: Final[Checks] = {
    "teacher, two workers": two_workers,
    "teacher, one worker": one_worker,
    **{f"teacher, {x}": partial(measured, x) for x in _CONTESTANTS},
}
