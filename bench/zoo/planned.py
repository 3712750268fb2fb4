"""What `hocket.plan` says before there is any pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any, Final

from bench.in_turn import Order
from bench.zoo.architecture import Architecture
from bench.zoo.contestants import adamw, model_of
from hocket.errors import HocketError
from hocket.planner.candidate import DDP
from hocket.planner.rank import Search
from hocket.planner.ranking.report import Ranking
from hocket.run.cluster.world import World
from hocket.run.tune.planning import plan

SCHEDULES: Final = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs")
STAGES_PER_DEVICE: Final = (1, 2, 3, 4)


def planned(
    architecture: Architecture, batch: Any, world: World
) -> tuple[dict[str, float], str]:
    """Seconds of a step by order, and of DDP, as a plan has them. On every worker.

    All workers plan at once, as they will compute at once; what they find is averaged.

    Returns:
        The seconds; none, where the model cannot be planned for, and then why.
    """
    if architecture.cut is not None:
        return {}, "it is cut by name, which a plan does not take"
    world.barrier("plan")
    try:
        ranking = plan(
            model_of(architecture),
            batch,
            architecture.loss,
            num_devices=world.world_size,
            optimizer=adamw,
            search=_search(architecture, world),
            world=world,
        )
    except HocketError as error:
        return {}, str(error).splitlines()[0]
    rows = world.gather_json(dict(_step_s(ranking, architecture)), "planned")
    return {name: fmean(part[name] for part in rows) for name in rows[0]}, ""


def fastest(step_s: dict[str, float]) -> Order:
    """The order of the shortest step; the simplest where nothing was planned."""
    orders = {str(order): order for order in _orders() if str(order) in step_s}
    if not orders:
        return Order("1f1b")
    return orders[min(orders, key=lambda name: step_s[name])]


def _search(architecture: Architecture, world: World) -> Search:
    return Search(
        schedules=SCHEDULES,
        num_devices=(world.world_size,),
        num_microbatches=(1, architecture.num_microbatches),
        stages_per_device=STAGES_PER_DEVICE,
        recompute=(False,),
        is_exhaustive=True,
    )


def _orders() -> Iterator[Order]:
    for name in SCHEDULES:
        for num_stages in STAGES_PER_DEVICE:
            yield Order(name, num_stages)


def _step_s(
    ranking: Ranking, architecture: Architecture
) -> Iterator[tuple[str, float]]:
    for outcome in ranking.outcomes:
        candidate = outcome.candidate
        if candidate.schedule == DDP and candidate.num_microbatches == 1:
            yield DDP, outcome.step_s
        if (
            candidate.schedule in SCHEDULES
            and candidate.num_microbatches == architecture.num_microbatches
        ):
            order = Order(candidate.schedule, candidate.stages_per_device)
            yield str(order), outcome.step_s
