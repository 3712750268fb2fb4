"""A teacher and its student on an accelerator: first that it is exact, then how fast.

    python -m bench.gpu.teacher [--size full|small] [--output FILE]

Two workers share one GPU (gloo, and messages staged through pinned memory), or have one
each (NCCL). Then one worker alone runs the teacher between the student's ops, and in a
second lane: a stream of lower priority. Without a GPU it runs on the CPU, which shows
only that the script works. Takes under ten minutes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from bench.gpu.check_then_measure import (
    NUM_ROUNDS,
    SIZES,
    STEPS_IN_TURN,
    TOLERANCE,
    relative_error,
    run,
)
from bench.gpu.checked import synchronize
from bench.measure import alternate, paired_ratio, spread
from bench.models import transformer
from hocket.run.cluster.world import World, join_world
from hocket.run.data.batch import split_batch

NUM_CHECKED_STEPS: Final = 10
NUM_MICROBATCHES: Final = 4
DELAYS: Final = (None, 0, 1)  # None: frozen


def worker(backend: str, size: str) -> dict[str, Any]:
    """What each worker does."""
    torch.backends.cuda.matmul.allow_tf32 = False
    world = join_world(backend=backend)
    return {
        "device": str(world.device),
        "exactness": [check(delay, world) for delay in DELAYS],
        "speed": [*measured(world, [(x, False) for x in DELAYS], *SIZES[size])],
    }


def lanes(backend: str, size: str) -> dict[str, Any]:
    """What a worker alone does: one lane or two."""
    torch.backends.cuda.matmul.allow_tf32 = False
    world = join_world(backend=backend)
    both = [(delay, lane) for delay in DELAYS for lane in (False, True)]
    return {
        "device": str(world.device),
        "exactness": [check(delay, world, own_lane=True) for delay in DELAYS],
        "speed": [*measured(world, both, *SIZES[size])],
    }


def check(delay: int | None, world: World, *, own_lane: bool = False) -> dict[str, Any]:
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


def measured(
    world: World,
    variants: Sequence[tuple[int | None, bool]],
    width: int,
    num_samples: int,
    num_tokens: int,
) -> Iterator[dict[str, Any]]:
    """Steps of all variants in turn: of delays, and lanes."""
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(num_samples, num_tokens, width, generator=rng)
    batch = x.to(world.device), torch.zeros(num_samples, device=world.device)
    pipelines = {
        (delay, lane): make_pipeline(
            *nets(width, torch.float32), batch, delay, world, own_lane=lane
        )
        for delay, lane in variants
    }

    def steps(pipeline: hocket.Pipeline) -> None:
        for _ in pipeline.train([batch] * STEPS_IN_TURN):
            pass
        synchronize(world.device)

    seconds = alternate(
        {str(key): partial(steps, pipeline) for key, pipeline in pipelines.items()},
        world,
        num_rounds=NUM_ROUNDS,
        num_warm=2,
    )
    for (delay, lane), pipeline in pipelines.items():
        own = seconds[str((delay, lane))]
        yield {
            "delay": str(delay),
            "own_lane": lane,
            "step": spread([x / STEPS_IN_TURN for x in own]),
            "same_batch_over_this": paired_ratio(seconds[str((0, False))], own),
            "one_lane_over_this": paired_ratio(seconds[str((delay, False))], own),
            "predicted_ms": round(pipeline.predicted.makespan_s * 1e3, 4),
            "bubble_measured": round(pipeline.measured().bubble_fraction, 4),
        }
    for pipeline in reversed(pipelines.values()):
        pipeline.close()


if __name__ == "__main__":
    run("teacher", __doc__, alone="lanes")
