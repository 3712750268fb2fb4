"""What each host does: train in all ways, in turn, and write down how long steps take.

reduce all gradients ─▶ set the link's rate ─▶ make the contestants ─▶ alternate
                        such that reductions take r times as long as computing
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hocket
from bench.in_turn import spread
from bench.ooo_data.hosts import set_rate
from bench.ooo_data.layers import NUM_CHANNELS, sleeping_resnet
from examples.zoo.small_resnet import ResNet
from hocket.core.op import Kind
from hocket.core.schedule import Schedule
from hocket.core.simulate import simulate
from hocket.planner.replicas.buckets import steady_step_s
from hocket.run.cluster.world import World, join_world

DDP_SIZES: Final = (None, 0.25, 0.5, 1.0)  # MB; None: as it comes
_NUM_STEPS: Final = 6  # of a contestant at a time; the first two and the last fill it
_NUM_REDUCTIONS: Final = 3
_HEADERS: Final = 1.05  # of packets, which the rate counts, too
_SLEEPING_S: Final = 0.3  # of forward and backward
_SLEEPING_BYTES: Final = 9e6
_NUM_IMAGES: Final = 16  # of a replica
_NUM_MORE: Final = 2  # values of k beside the one that is found


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained.

    Args:
        model: makes it, the same each time.
        batch: of both replicas.
        loss: of a replica's part.
        folder: for profiles.
    """

    model: Callable[[], nn.Module]
    batch: tuple[Tensor, Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    folder: Path

    def part(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return a replica's part of the batch."""
        inputs, targets = (x.chunk(2)[rank] for x in self.batch)
        return inputs, targets


Run = Callable[[], float]  # trains some steps; the seconds of one of them


def main() -> None:
    """Measure each r; rank 0 writes the rows as JSON."""
    name, ratios, num_rounds, output = sys.argv[1:]
    torch.set_num_threads(1)
    path = Path(output)
    job = _job(name, path.parent)
    with closing(join_world()) as world:
        rows = []
        for ratio in map(float, ratios.split(",")):
            rows.append(_row(world, job, ratio, int(num_rounds)))
            if world.rank == 0:
                print(json.dumps(rows[-1]), flush=True)
                path.write_text(json.dumps(rows), encoding="utf-8")


def _job(name: str, folder: Path) -> Job:
    generator = torch.Generator().manual_seed(1)
    if name == "sleeping":
        inputs = torch.randn(2, NUM_CHANNELS, generator=generator)
        make = lambda: sleeping_resnet(_SLEEPING_S, _SLEEPING_BYTES)  # noqa: E731
        return Job(make, (inputs, torch.zeros(2)), _mean, folder)
    inputs = torch.randn(2 * _NUM_IMAGES, 3, 32, 32, generator=generator)
    targets = torch.randint(10, (2 * _NUM_IMAGES,), generator=generator)
    return Job(_resnet, (inputs, targets), nn.functional.cross_entropy, folder)


def _mean(output: Tensor, _targets: Tensor) -> Tensor:
    """A loss that takes no time."""
    return output.mean()


def _resnet() -> nn.Module:
    torch.manual_seed(0)
    return ResNet(SimpleNamespace(num_channels=3, num_classes=10), 32, 3)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def _row(world: World, job: Job, ratio: float, num_rounds: int) -> dict[str, Any]:
    """Measure all contestants at one rate of the link."""
    alone = _alone(world, job)
    compute_s = max(world.gather_json(median(alone() for _ in range(3)), "compute"))
    num_bytes = sum(4 * p.numel() for p in job.model().parameters())
    set_rate(_HEADERS * num_bytes / (ratio * compute_s))
    reduced_s = _reduced_s(world, num_bytes)
    with ExitStack() as stack:
        steps, predicted, facts = _contestants(world, job, stack)
        seconds = _in_turn(world, steps, num_rounds)
    return {
        "r": ratio,
        "r_measured": round(reduced_s / compute_s, 4),
        "compute_ms": round(compute_s * 1e3, 2),
        "gradient_bytes": num_bytes,
        **facts,
        "contestants": {
            name: {**spread(seconds[name]), "predicted_ms": predicted.get(name)}
            for name in steps
        },
    }


def _reduced_s(world: World, num_bytes: int) -> float:
    gradients = torch.zeros(num_bytes // 4)
    dist.all_reduce(gradients)  # fills the queue once
    world.barrier("reductions")
    begin_s = perf_counter()
    for _ in range(_NUM_REDUCTIONS):
        dist.all_reduce(gradients)
    seconds = (perf_counter() - begin_s) / _NUM_REDUCTIONS
    return float(max(world.gather_json(seconds, "reduction")))


def _in_turn(
    world: World, steps: Mapping[str, Run], num_rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each contestant's step in each round, and one to warm up.

    The slower of the two hosts counts.
    """
    names = list(steps)
    own: dict[str, list[float]] = {name: [] for name in names}
    for number in range(1 + num_rounds):
        for name in names if number % 2 else names[::-1]:
            world.barrier("round")
            own[name].append(steps[name]())
    everyone = world.gather_json({name: own[name][1:] for name in names}, "rounds")
    return {
        name: [max(pair) for pair in zip(*(x[name] for x in everyone), strict=True)]
        for name in names
    }


def _contestants(
    world: World, job: Job, stack: ExitStack
) -> tuple[dict[str, Run], dict[str, float], dict[str, Any]]:
    """Return how each trains; what is predicted of some; and what was chosen."""
    steps: dict[str, Run] = {}
    for size in DDP_SIZES:
        name = "DDP" if size is None else f"DDP, {size:g} MB"
        steps[name] = _ddp(world, job, size)
    found = _pipeline(world, job, stack, "reverse-first-k", None)
    plan = found.plan
    num_buckets = plan.schedule.program.num_stages
    k = _k_of(plan.schedule)
    predicted = {"found": _ms(steady_step_s(plan.predicted))}
    steps["found"] = _training(found, job)
    cut = list(plan.stage_names[1:])
    for other in _other_ks(num_buckets, k):
        for barrier in (True, False) if not other else (False,):
            name = f"k = {other}{', barrier' if barrier else ''}"
            order = _order(num_buckets, other, barrier=barrier)
            played = _order(num_buckets, other, barrier=barrier, num_steps=1)
            pipeline = _pipeline(world, job, stack, played if barrier else order, cut)
            steps[name] = _training(pipeline, job)
            link = plan.costs.reduce_link
            costs = replace(pipeline.plan.costs, reduce_link=link)
            predicted[name] = _ms(steady_step_s(simulate(order, costs)))
    sizes = [cost.gradient_bytes for cost in plan.costs.stages]
    return steps, predicted, {"num_buckets": num_buckets, "k": k, "bytes": sizes}


def _other_ks(num_buckets: int, k: int) -> Iterator[int]:
    """Yield 0, and some others up to all buckets."""
    others = {round(num_buckets * i / _NUM_MORE) for i in range(1, _NUM_MORE + 1)}
    yield from sorted({0} | others - {k})


def _order(
    num_buckets: int, k: int, *, barrier: bool = False, num_steps: int = 5
) -> Schedule:
    return hocket.make_schedule(
        "reverse-first-k",
        num_devices=1,
        num_microbatches=1,
        num_steps=num_steps,
        num_replicas=2,
        stages_per_device=num_buckets,
        k=k,
        barrier=barrier,
    )


def _k_of(schedule: Schedule) -> int:
    ops = schedule.lanes[0].ops
    return sum(op.kind is Kind.BACKWARD_WEIGHT and not op.step for op in ops)


def _pipeline(
    world: World,
    job: Job,
    stack: ExitStack,
    schedule: str | Schedule,
    cut: list[str] | None,
) -> hocket.Pipeline:
    pipeline = hocket.Pipeline(
        job.model(),
        job.loss,
        optimizer=_sgd,
        example=job.batch,
        num_replicas=2,
        num_microbatches=1,
        schedule=schedule,
        cut=cut,
        profile_dir=job.folder,
        run_dir=job.folder,
        world=world,
    )
    return stack.enter_context(pipeline)


def _training(pipeline: hocket.Pipeline, job: Job) -> Run:
    return lambda: _per_step(pipeline.train([job.batch] * _NUM_STEPS))


def _ddp(world: World, job: Job, size: Any) -> Run:  # torch's type is int
    parallel = DistributedDataParallel(job.model(), bucket_cap_mb=size)
    return _loop(parallel, job.part(world.rank), job)


def _alone(world: World, job: Job) -> Run:
    return _loop(job.model(), job.part(world.rank), job)


def _loop(model: nn.Module, part: tuple[Tensor, Tensor], job: Job) -> Run:
    """Train as PyTorch's users do."""
    optimizer = _sgd(model.parameters())

    def steps() -> Iterator[None]:
        for _ in range(_NUM_STEPS):
            optimizer.zero_grad()
            job.loss(model(part[0]), part[1]).backward()
            optimizer.step()
            yield

    return lambda: _per_step(steps())


def _per_step(results: Iterable[object]) -> float:
    """Return the mean seconds of a step, while steps follow each other."""
    ends_s = [perf_counter() for _ in results]
    return (ends_s[-2] - ends_s[1]) / (len(ends_s) - 3)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


if __name__ == "__main__":
    main()
