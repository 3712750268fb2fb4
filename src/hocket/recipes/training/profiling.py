"""Profiles a recipe's model on all its workers at the same time.

Workers share caches and memory, so that a layer measured alone is faster than one
measured beside the others. `hocket train` uses the saved profile.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hocket.model.profile.profile import path_of
from hocket.recipes.config.resolve import resolve
from hocket.recipes.run_files import RECIPE_NAME
from hocket.recipes.training.step_layout import StepLayout
from hocket.recipes.training.task import make_task
from hocket.recipes.training.train import make_pipeline


def main(run_dir: str, is_again: bool) -> dict[str, Any]:
    """Profile, cut and predict the recipe in a folder; each worker's entry.

    Args:
        run_dir: the folder, with its `recipe.toml`.
        is_again: measure even if there is a saved profile, and replace it.

    Returns:
        As JSON: the profile, its path if it is kept, whether it was there before, the
        number of each stage's first layer, and the predicted step.
    """
    recipe = resolve(str(Path(run_dir) / RECIPE_NAME), allow_outside=True).recipe
    task = make_task(recipe)
    layout = StepLayout.of(recipe, task.training)
    folder = Path(recipe.run.profile_folder)
    kept = {path.name for path in folder.glob("*.json")}
    profile_dir = None if is_again else folder
    with make_pipeline(
        task, layout, Path(run_dir), profile_dir=profile_dir
    ) as pipeline:
        plan = pipeline.plan
        conditions = plan.profile.conditions
        path = path_of(folder, conditions) if conditions["code"] else None
        if is_again and pipeline.is_main and path is not None:
            plan.profile.save(path)
        predicted = plan.predicted
        return {
            "recipe": recipe.run.name,
            "profile": plan.profile.to_json(),
            "path": path and str(path),
            "was_kept": path is not None and path.name in kept and not is_again,
            "stages": [0, *plan.boundaries],
            "step_s": predicted.step_s,
            "bubble_fraction": predicted.bubble_fraction,
        }
