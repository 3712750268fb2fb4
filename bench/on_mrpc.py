"""What the experiments on MRPC share: two workers, and a training of each contestant.

A contestant is the recipe `mrpc-bert` with settings of its own, on the same weights and
the same batches as all others.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from bench.in_turn import environment
from examples.zoo.glue import glue
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.resolve import resolve
from hocket.recipes.config.sections import DataFunctionSettings
from hocket.recipes.training.task import Task, make_task
from hocket.recipes.training.train import make_pipeline
from hocket.run.cluster.launch import launch
from hocket.run.cluster.world import World, join_world
from hocket.run.diagnostics.job_folder import Json
from hocket.run.pipeline import Pipeline

RECIPE: Final = "mrpc-bert"
NUM_WORKERS: Final = 2
TIMEOUT_S: Final = 300.0

# A third of BERT-base's width, and half of the recipe's tokens: a step of 16 pairs
# of sentences takes two cores half a second.
SIZES: Final = (
    "model.width=256",
    "model.num_heads=4",
    "model.mlp_width=1024",
    "data.num_tokens=64",
    "data.num_pieces=8000",
    "training.batch_size=16",
    "pipeline.num_microbatches=4",
)

C = TypeVar("C")


def launched(
    entry: str,
    folder: Path,
    sizes: Sequence[str],
    num_steps: int,
    contestants: Sequence[Json],
    *more: Json,
) -> dict[str, Any]:
    """What the workers of this machine found.

    Args:
        entry: `module:function`; called with settings, contestants, a folder, and
            what there is more.
        folder: of MRPC.
        sizes: settings of the recipe.
        num_steps: of each contestant's training.
        contestants: their names, as the workers know them.
        more: for the function.

    Raises:
        DataError: the data are missing or malformed; names where to get them.
        MissingPackageError: transformers is not installed.
        WorkerError: a worker failed.
    """
    glue(str(folder), "mrpc")  # refuses it before any worker starts
    settings: Json = [
        f"data.path={folder.resolve()}",
        f"training.max_steps={num_steps}",
        *sizes,
    ]
    with tempfile.TemporaryDirectory() as place:
        found, *_ = launch(
            entry,
            [settings, [*contestants], place, *more],
            num_workers=NUM_WORKERS,
            run_dir=Path(place),
            timeout_s=TIMEOUT_S,
        )
    return dict(found)


@dataclass(slots=True)
class Run:
    """One contestant's training.

    Args:
        pipeline: that trains.
        task: what it trains, and in which steps.
        batches: that are left.
        losses: of the steps done.
    """

    pipeline: Pipeline
    task: Task
    batches: Iterator[Any]
    losses: list[float]

    @classmethod
    def of(cls, recipe: Recipe, task: Task, world: World, place: Path) -> Run:
        """Ready to train: batches are read and written in word pieces before."""
        pipeline = make_pipeline(
            task, place, profile_dir=place / "profiles", world=world
        )
        batches = [*islice(task.loader(), task.num_steps)]
        return cls(pipeline, task, iter(batches), [])

    def step(self) -> None:
        """Train on the next batch."""
        self.losses.append(self.pipeline.step(next(self.batches)).loss)


@contextmanager
def ready(
    settings: Sequence[str], contestants: Mapping[C, Iterable[str]], place: str
) -> Iterator[tuple[dict[C, Run], Task, World]]:
    """All contestants on one worker, ready to train; their pipelines are closed.

    Args:
        settings: of the recipe.
        contestants: with what each sets besides.
        place: a folder that all of them use.
    """
    torch.set_num_threads(1)
    recipes = {
        contestant: resolve(RECIPE, [*settings, *own], allow_outside=True).recipe
        for contestant, own in contestants.items()
    }
    with closing(join_world()) as world, ExitStack() as stack:
        task = make_task(next(iter(recipes.values())))
        runs: dict[C, Run] = {}
        for contestant, recipe in recipes.items():
            run = Run.of(recipe, task, world, Path(place))
            stack.callback(run.pipeline.close)
            runs[contestant] = run
        yield runs, task, world


def setting(run: Run, task: Task, world: World) -> dict[str, Any]:
    """What all contestants had in common, with keys that stay; `run` is any of them."""
    recipe = run.task.recipe
    assert isinstance(recipe.data, DataFunctionSettings), "it is MRPC's recipe"
    return {
        "environment": environment(),
        "recipe": RECIPE,
        "model": recipe.model.model_dump(),
        "num_parameters": sum(p.numel() for p in task.make_model().parameters()),
        "num_tokens": recipe.data.arguments["num_tokens"],
        "num_devices": world.world_size,
        "num_microbatches": recipe.pipeline.num_microbatches,
        "batch_size": recipe.training.batch_size,
    }
