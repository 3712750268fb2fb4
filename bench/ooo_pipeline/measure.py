"""BERT fine-tuned on MRPC by two CPU workers: the orders of work beside each other.

As in the fine-tuning experiment of out-of-order backprop (Oh et al., EuroSys'22, doi
10.1145/3492321.3519563) a batch has four microbatches; and BERT is so narrow that two
cores train it. Every order is a recipe of its own, `mrpc-bert` with other settings, on
the same weights and the same batches, so that losses must be the same, too; but what
dropout draws depends on where stages begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.in_turn import Order, alternate, paired_ratio, spread
from bench.on_mrpc import (
    NUM_WORKERS,
    SIZES,
    Run,
    launched,
    ready,
    setting,
)
from hocket.core.costs import Costs, StageCost
from hocket.core.simulate import simulate
from hocket.recipes.training.task import Task
from hocket.run.cluster.world import World
from hocket.schedules import make_schedule

ENTRY: Final = "bench.ooo_pipeline.measure:worker"
NUM_WARM: Final = 2  # rounds, after which optimizers have their state

PLAIN: Final = Order("gpipe")  # what all others are compared with
ORDERS: Final = (
    PLAIN,
    Order("1f1b"),
    Order("ooo-fast-forward"),
    Order("ooo-modulo", 2),
    Order("ooo-modulo", 6),
    Order("zb-h1"),
    Order("zb-h2"),
    Order("zb-v", 2),
)


def measure(
    folder: Path,
    *,
    num_rounds: int = 12,
    sizes: Sequence[str] = SIZES,
    orders: Sequence[Order] = ORDERS,
) -> dict[str, Any]:
    """Train with every order in turn, on two workers of this machine.

    Args:
        folder: of MRPC.
        num_rounds: that count; each trains one step with every order.
        sizes: settings of the recipe.
        orders: the first is what all others are compared with.

    Returns:
        Plain values with keys that stay; "rows" has one for each order.

    Raises:
        DataError: the data are missing or malformed; names where to get them.
        MissingPackageError: transformers is not installed.
        WorkerError: a worker failed.
    """
    return launched(
        ENTRY,
        folder,
        sizes,
        NUM_WARM + num_rounds,
        [[order.schedule, order.stages_per_device] for order in orders],
    )


def worker(settings: list[str], orders: list[list[Any]], place: str) -> dict[str, Any]:
    """What each of the workers does."""
    contestants = {
        Order(schedule, stages_per_device): (
            f"pipeline.schedule={schedule}",
            f"pipeline.stages_per_device={stages_per_device}",
        )
        for schedule, stages_per_device in orders
    }
    with ready(settings, contestants, place) as (runs, task, world):
        return _measured(runs, task, world)


def _measured(runs: dict[Order, Run], task: Task, world: World) -> dict[str, Any]:
    steps = {str(order): run.step for order, run in runs.items()}
    plain, *_ = runs.values()
    num_rounds = plain.task.num_steps - NUM_WARM
    seconds = alternate(steps, world, num_rounds=num_rounds, num_warm=NUM_WARM)
    return {
        **setting(plain, task, world),
        "num_rounds": num_rounds,
        "rows": [_row(order, runs, seconds) for order in runs],
    }


def _row(
    order: Order, runs: dict[Order, Run], seconds: dict[str, list[float]]
) -> dict[str, Any]:
    """Beside the first order, as are all ratios: above 1 is faster than that."""
    first, *_ = runs
    own, plain = (runs[x].pipeline.predicted.makespan_s for x in (order, first))
    m = runs[order].task.recipe.pipeline.num_microbatches
    return {
        "schedule": order.schedule,
        "stages_per_device": order.stages_per_device,
        "step": spread(seconds[str(order)]),
        "times_as_fast": paired_ratio(seconds[str(first)], seconds[str(order)]),
        "simulated_ms": round(own * 1e3, 4),
        "simulated_times_as_fast": round(plain / own, 4),
        "ideal_times_as_fast": round(_ideal_s(first, m) / _ideal_s(order, m), 4),
        "last_loss": runs[order].losses[-1],
    }


def _ideal_s(order: Order, num_microbatches: int) -> float:
    """If F, I and W took a second each, and messages nothing."""
    schedule = make_schedule(
        order.schedule,
        num_devices=NUM_WORKERS,
        num_microbatches=num_microbatches,
        stages_per_device=order.stages_per_device,
    )
    share = StageCost(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0)
    return simulate(schedule, Costs((share,), is_device_share=True)).makespan_s
