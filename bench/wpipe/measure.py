"""WPipe beside 2BW, 1F1B and data parallelism: BERT on MRPC by two CPU workers.

Every contestant is the recipe `mrpc-bert` with another schedule and layout, on the same
weights and the same batches. They take turns, some steps each: an order without a flush
is full only between its first steps and its last ones.

    step          0    1    2    3    4    5    6    7
    its result  ──┴────┴────┴────┴────┴────┴────┴────┴─
                 fill  └─────── counted ────────┘ drain

As in WPipe's experiments (Yang et al., ICLR'22) there is fine-tuning to compare, too:
how far the loss has come, and what the evaluation says at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch.distributed as dist

from bench.in_turn import paired_ratio, spread
from bench.on_mrpc import SIZES, Run, launched, ready, setting
from hocket.core.check import check
from hocket.core.costs import Costs, StageCost
from hocket.core.layout import WorkerLayout
from hocket.core.plans.lane_plan import portions
from hocket.core.simulate import simulate
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.objectives import evaluation_loader
from hocket.recipes.training.task import Task
from hocket.run.cluster.world import World
from hocket.run.pipeline import Pipeline
from hocket.schedules import make_schedule

ENTRY: Final = "bench.wpipe.measure:worker"
NUM_WARM: Final = 1  # rounds, after which optimizers have their state
STEPS_PER_ROUND: Final = 8
_FULL_STEPS: Final = 3  # and as many as there are devices: then a pipeline is full

Times = list[float]  # of one round: its begin, and when each step's result was there


@dataclass(frozen=True, slots=True)
class Contestant:
    """What trains.

    Args:
        schedule: its name.
        layout: devices per pipeline x replicas.
        num_microbatches: in each replica; the sizes' own where it is not said.
    """

    schedule: str
    layout: str
    num_microbatches: int | None = None

    def settings(self) -> Iterator[str]:
        """Of its recipe."""
        yield f"pipeline.schedule={self.schedule}"
        yield "pipeline.num_workers="
        yield f"pipeline.layout={self.layout}"
        if self.num_microbatches is not None:
            yield f"pipeline.num_microbatches={self.num_microbatches}"


TWO_BW: Final = Contestant("pipedream-2bw", "2x1")  # what all are compared with
CONTESTANTS: Final = (
    TWO_BW,
    Contestant("1f1b", "1x2", 1),  # data parallelism
    Contestant("1f1b", "2x1"),
    Contestant("wpipe", "2x1"),
    Contestant("wpipe-overlapped", "2x1"),
)


def measure(
    folder: Path,
    *,
    num_rounds: int = 12,
    sizes: Sequence[str] = SIZES,
    contestants: Sequence[Contestant] = CONTESTANTS,
) -> dict[str, Any]:
    """Train every contestant in turn, on two workers of this machine.

    Args:
        folder: of MRPC.
        num_rounds: that count; in each, every contestant trains some steps.
        sizes: settings of the recipe.
        contestants: the first is what all others are compared with.

    Returns:
        Plain values with keys that stay; "rows" has one for each contestant.

    Raises:
        DataError: the data are missing or malformed; names where to get them.
        MissingPackageError: transformers is not installed.
        WorkerError: a worker failed.
    """
    return launched(
        ENTRY,
        folder,
        sizes,
        STEPS_PER_ROUND * (NUM_WARM + num_rounds),
        [[each.schedule, each.layout, each.num_microbatches] for each in contestants],
        STEPS_PER_ROUND,
    )


def worker(
    settings: list[str], contestants: list[list[Any]], place: str, steps_per_round: int
) -> dict[str, Any]:
    """What each of the workers does."""
    own = {each: each.settings() for each in (Contestant(*x) for x in contestants)}
    with ready(settings, own, place) as (runs, task, world):
        return _measured(runs, task, world, steps_per_round)


def _measured(
    runs: dict[Contestant, Run], task: Task, world: World, steps_per_round: int
) -> dict[str, Any]:
    first, *_ = runs.values()
    num_rounds = first.task.num_steps // steps_per_round
    rounds = _in_turn(runs, world, num_rounds, steps_per_round)
    return {
        **setting(first, task, world),
        "num_rounds": num_rounds - NUM_WARM,
        "steps_per_round": steps_per_round,
        "rows": [_row(contestant, runs, rounds, task) for contestant in runs],
    }


def _train(run: Run, num_steps: int) -> Times:
    """Train so many steps in a row."""
    times = [perf_counter()]
    for result in run.pipeline.train([*islice(run.batches, num_steps)]):
        run.losses.append(result.loss)
        times.append(perf_counter())
    return times


def _accuracy(run: Run, task: Task) -> float:
    """Of what it has learned by now."""
    loader = evaluation_loader(run.task.recipe, task.evaluation)
    return run.pipeline.evaluate(loader, task.metrics).metrics["accuracy"]


def _in_turn(
    runs: dict[Contestant, Run], world: World, num_rounds: int, steps_per_round: int
) -> dict[Contestant, list[Times]]:
    """When the last worker had each result, by contestant and round; warm ones out."""
    own: list[list[Times]] = [[] for _ in runs]
    order = [*enumerate(runs.values())]
    for number in range(num_rounds):
        for i, run in order if number % 2 else order[::-1]:
            if world.world_size > 1:
                dist.barrier()
            own[i].append(_train(run, steps_per_round))
    everyone: list[Any] = world.gather_json([[*map(list, x)] for x in own])
    return {
        contestant: [
            [max(moments) for moments in zip(*workers, strict=True)]
            for r in range(NUM_WARM, num_rounds)
            for workers in [[part[i][r] for part in everyone]]
        ]
        for i, contestant in enumerate(runs)
    }


def _step_s(times: Times, num_drained: int) -> float:
    """While the pipeline is full: after the second result, and before it drains."""
    return (times[-1 - num_drained] - times[2]) / (len(times) - 3 - num_drained)


def _num_drained(run: Run) -> int:
    """Results that come together when no batch is left; and one in any case."""
    order = run.pipeline.plan.schedule
    if not order.body:
        return 1
    parts = portions(order)
    return max(1, parts.num_steps - parts.num_ended)


def _round_step_s(times: Times) -> float:
    """With its share of filling and draining."""
    return (times[-1] - times[0]) / (len(times) - 1)


def _row(
    contestant: Contestant,
    runs: dict[Contestant, Run],
    rounds: dict[Contestant, list[Times]],
    task: Task,
) -> dict[str, Any]:
    """Beside the first contestant, as are all ratios: above 1 is faster than that."""
    first, *_ = runs
    run = runs[contestant]
    own, other = (
        [_step_s(times, _num_drained(runs[x])) for times in rounds[x]]
        for x in (contestant, first)
    )
    own_s, other_s = (runs[x].pipeline.predicted.step_s for x in (contestant, first))
    ideal_s, other_ideal_s = (
        _ideal_s(runs[x].task.recipe) for x in (contestant, first)
    )
    return {
        "schedule": contestant.schedule,
        "layout": contestant.layout,
        "num_microbatches": run.task.recipe.pipeline.num_microbatches,
        "step": spread(own),
        "round_step": spread([*map(_round_step_s, rounds[contestant])]),
        "times_as_fast": paired_ratio(other, own),
        "simulated_ms": round(own_s * 1e3, 4),
        "simulated_times_as_fast": round(other_s / own_s, 4),
        "ideal_times_as_fast": round(other_ideal_s / ideal_s, 4),
        "old_bytes": _old_bytes(run.pipeline),
        "last_loss": run.losses[-1],
        "accuracy": _accuracy(run, task),
    }


def _ideal_s(recipe: Recipe) -> float:
    """If F, I and W of a sample took a second each, and messages nothing."""
    pipeline = recipe.pipeline
    layout = WorkerLayout(
        pipeline.num_workers // pipeline.num_replicas, pipeline.num_replicas
    )
    num_parts = layout.num_replicas * pipeline.num_microbatches
    share_s = recipe.training.batch_size / num_parts / layout.num_devices

    share = StageCost(forward_s=share_s, input_grad_s=share_s, weight_grad_s=share_s)
    order = make_schedule(
        pipeline.schedule,
        num_devices=layout.num_devices,
        num_microbatches=pipeline.num_microbatches,
        num_replicas=layout.num_replicas,
        stages_per_device=pipeline.stages_per_device,
        num_steps=_FULL_STEPS + layout.num_devices,
    )
    return simulate(order, Costs((share,), is_device_share=True)).step_s


def _old_bytes(pipeline: Pipeline) -> int:
    """Of all stages, what of older weights is kept beside the newest."""
    plan = pipeline.plan
    versions = check(plan.schedule).num_versions
    pairs = zip(versions, plan.costs.stages, strict=True)
    return sum((number - 1) * cost.gradient_bytes for number, cost in pairs)
