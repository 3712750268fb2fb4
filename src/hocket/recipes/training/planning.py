"""Plan a recipe: in this process, or measured by as many workers as it would have."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from hocket.planner.rank import PlanConfig, Search
from hocket.planner.ranking.ranking import Ranking
from hocket.planner.ranking.report import to_html
from hocket.planner.ranking.table import to_text
from hocket.recipes.config.resolve import Resolved, resolve
from hocket.recipes.run_files import RECIPE_NAME
from hocket.recipes.training.optimizer import make_optimizer
from hocket.recipes.training.step_layout import StepLayout
from hocket.recipes.training.task import make_task
from hocket.run.cluster.world import World, join_world
from hocket.run.tune.planning import plan
from hocket.signatures import values_of


@dataclass(frozen=True, slots=True)
class Paper:
    """How a ranking is to be shown.

    Args:
        num_rows: the table's rows.
        width: columns of text.
        is_terminal: whether colours can be seen.
        has_page: whether an HTML page is wanted.
    """

    num_rows: int
    width: int
    is_terminal: bool
    has_page: bool


@dataclass(frozen=True, slots=True)
class Shown:
    """A ranking as it is shown.

    Args:
        text: the table, the choice, the picture.
        document: all outcomes, as JSON has them.
        page: HTML; empty where none was wanted.
    """

    text: str
    document: dict[str, Any]
    page: str

    @classmethod
    def of(cls, ranking: Ranking, paper: Paper) -> Shown:
        """Draw it.

        Raises:
            PlanError: a page was wanted, and nothing fits.
        """
        text = to_text(
            ranking,
            num_rows=paper.num_rows,
            width=paper.width,
            is_terminal=paper.is_terminal,
        )
        page = to_html(ranking) if paper.has_page else ""
        return cls(text, ranking.to_json(), page)


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
    resolved = resolve(str(Path(run_dir) / RECIPE_NAME), allow_outside=True)
    with closing(join_world()) as world:
        config = TypeAdapter(PlanConfig).validate_python(request)
        ranking = plan_recipe(resolved, config, world)
        return {} if world.rank else asdict(Shown.of(ranking, Paper(**paper)))


def plan_recipe(
    resolved: Resolved, config: PlanConfig, world: World | None = None
) -> Ranking:
    """Predict every way to train a recipe.

    Args:
        resolved: the recipe.
        config: what to plan for; batch size and precision are the recipe's when not
            given.
        world: the job, where all its workers measure.

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
        correction=recipe.pipeline.correction if search.max_delay else "none",
        teachers=task.make_teachers(layout.num_steps),
        world=world,
        **values_of(PlanConfig, config),
    )
