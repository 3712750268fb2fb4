"""Plan a recipe: in this process, or measured by as many workers as it would have."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

from pydantic import TypeAdapter

from hocket.planner.rank import PlanConfig, Progress, Search
from hocket.planner.ranking.report import Ranking, Shown
from hocket.planner.ranking.table import Paper
from hocket.recipes.config.resolve import Resolved, resolved_in
from hocket.recipes.training.optimizer import make_optimizer
from hocket.recipes.training.step_layout import StepLayout
from hocket.recipes.training.task import make_task
from hocket.run.cluster.world import World, join_world
from hocket.run.tune.planning import plan
from hocket.signatures import values_of


def main(
    run_dir: str, request: dict[str, Any], paper: dict[str, Any]
) -> dict[str, Any]:
    """Plan the recipe that a folder holds; each worker's entry.

    Args:
        run_dir: the folder, with its `recipe.toml`.
        request: a `PlanConfig`, as JSON.
        paper: a `Paper`.

    Returns:
        On rank 0 a `Shown`, else nothing.
    """
    resolved = resolved_in(run_dir)
    with closing(join_world()) as world:
        config = TypeAdapter(PlanConfig).validate_python(request)
        ranking = plan_recipe(resolved, config, world)
        return {} if world.rank else asdict(Shown.of(ranking, Paper(**paper)))


def plan_recipe(
    resolved: Resolved,
    config: PlanConfig,
    world: World | None = None,
    progress: Progress | None = None,
) -> Ranking:
    """Predict every way to train a recipe.

    Args:
        resolved: the recipe.
        config: what to plan for; batch size and precision are the recipe's when not
            given.
        world: the job, where all its workers measure.
        progress: called with the number of candidates done, and of all.

    Raises:
        DataError: its data are missing or too few.
        PlanError: a name that is not known, or numbers that nothing fits.
    """
    recipe = resolved.recipe
    task = make_task(recipe)
    layout = StepLayout.of(recipe, task.training)
    search, training = config.search or Search(), recipe.training
    config = replace(
        config,
        batch_size=config.batch_size or training.batch_size,
        precision=config.precision or training.precision,
        search=replace(search, clips=training.clip_norm is not None),
    )
    return plan(
        task.make_model(),
        next(iter(layout.loader())),
        task.loss,
        optimizer=make_optimizer(recipe.optimizer),
        teachers=task.make_teachers(layout.num_steps),
        world=world,
        progress=progress,
        **values_of(PlanConfig, config),
    )
