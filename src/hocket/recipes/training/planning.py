"""Plan a recipe: in this process, or measured by as many workers as it would have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from hocket.planner.rank import Search
from hocket.planner.ranking.ranking import Ranking
from hocket.planner.ranking.report import to_html
from hocket.planner.ranking.table import show
from hocket.recipes.config.resolve import Resolved, resolve
from hocket.recipes.training.optimizer import make_optimizer
from hocket.recipes.training.run_folder import RECIPE_NAME
from hocket.recipes.training.step_layout import StepLayout
from hocket.recipes.training.task import make_task
from hocket.run.cluster.world import World, join_world
from hocket.run.tune.planning import plan


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What to plan a recipe for; `hocket.plan` says what each is.

    Args:
        memory_gib: the memory of each device.
        hardware_file: its path.
        batch_size: the recipe's when not given.
        precision: the recipe's when not given.
        is_exhaustive: simulate also what cannot be among the best.
        max_delay: the most updates by which weights may be stale.
        devices_per_pipeline: the devices of one replica; everything that divides the
            devices when not given.
    """

    num_devices: int
    hardware: str | None = None
    links: str | None = None
    num_nodes: int = 1
    network: str | None = None
    memory_gib: float | None = None
    hardware_file: str | None = None
    batch_size: int | None = None
    precision: str | None = None
    is_exhaustive: bool = False
    max_delay: int = 0
    devices_per_pipeline: int | None = None

    @property
    def search(self) -> Search:
        """Which candidates are looked at."""
        each = self.devices_per_pipeline
        return Search(
            num_devices=None if each is None else (each,),
            is_exhaustive=self.is_exhaustive,
            max_delay=self.max_delay,
        )


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
        file = StringIO()
        console = Console(
            file=file, width=paper.width, force_terminal=paper.is_terminal
        )
        show(ranking, console, num_rows=paper.num_rows)
        text = "\n".join(line.rstrip() for line in file.getvalue().splitlines())
        page = to_html(ranking) if paper.has_page else ""
        return cls(text, ranking.to_json(), page)


def main(
    run_dir: str, request: dict[str, Any], paper: dict[str, Any]
) -> dict[str, Any]:
    """Plan the recipe that a folder holds; each worker's entry.

    Args:
        run_dir: the folder, with its `recipe.toml`.
        request: a `PlanRequest`.
        paper: a `Paper`.

    Returns:
        On rank 0 a `Shown`, else nothing.
    """
    resolved = resolve(str(Path(run_dir) / RECIPE_NAME), allow_outside=True)
    with _joined() as world:
        ranking = plan_recipe(resolved, PlanRequest(**request), world)
        return {} if world.rank else asdict(Shown.of(ranking, Paper(**paper)))


def plan_recipe(
    resolved: Resolved, request: PlanRequest, world: World | None = None
) -> Ranking:
    """Predict every way to train a recipe.

    Args:
        resolved: the recipe.
        request: what to plan for.
        world: the job, where all its workers measure.

    Raises:
        DataError: its data are missing or too few.
        PlanError: a name that is not known, or numbers that nothing fits.
    """
    task = make_task(resolved.recipe)
    layout = StepLayout.of(resolved.recipe, task.training)
    training = resolved.recipe.training
    gib, file = request.memory_gib, request.hardware_file
    return plan(
        task.make_model(),
        next(iter(layout.loader())),
        task.loss,
        num_devices=request.num_devices,
        hardware=request.hardware,
        links=request.links,
        num_nodes=request.num_nodes,
        network=request.network,
        optimizer=make_optimizer(resolved.recipe.optimizer),
        batch_size=request.batch_size or training.batch_size,
        precision=request.precision or training.precision,
        memory_bytes=None if gib is None else int(gib * 2**30),
        correction=resolved.recipe.pipeline.correction if request.max_delay else "none",
        hardware_file=None if file is None else Path(file),
        search=replace(request.search, clips=training.clip_norm is not None),
        world=world,
    )


@contextmanager
def _joined() -> Iterator[World]:
    world = join_world()
    try:
        yield world
    finally:
        world.close()
