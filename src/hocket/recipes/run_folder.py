"""The folder of one run: made once, owned by one run, never written over.

    runs/digits-vit-20260704-101500/
        recipe.toml      the recipe as resolved; whoever creates it owns the folder
        metrics.jsonl    (hocket.recipes.metrics_log)
        tensorboard/
        report.html      predicted and measured timeline
        sample.txt       what a model of text writes
        workers/         what workers leave when they fail (hocket.run.job)

Two runs never share one: of two that want the same, the second is told.
"""

from __future__ import annotations

from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Final

from hocket.errors import RecipeError
from hocket.recipes.resolve import Resolved

RECIPE_NAME: Final = "recipe.toml"
REPORT_NAME: Final = "report.html"
SAMPLE_NAME: Final = "sample.txt"


def make_folder(resolved: Resolved, run_dir: Path | None) -> Path:
    """The folder of a run that begins now.

    Args:
        resolved: the recipe, which goes into the folder.
        run_dir: the folder that the user names, if any.

    Raises:
        RecipeError: it cannot be used.
    """
    text = resolved.to_toml()
    if run_dir is not None:
        return claim_folder(run_dir, text)
    run = resolved.recipe.run
    return new_folder(Path(run.folder), run.name, text, datetime.now())


def new_folder(parent: Path, name: str, recipe_text: str, now: datetime) -> Path:
    """Make the folder `parent/name-date-time`, or the first free one after it.

    Args:
        parent: made where it is missing.
        name: of the run.
        recipe_text: what `recipe.toml` will hold.
        now: the time in the folder's name.

    Raises:
        RecipeError: no folder can be made there.
    """
    for attempt in count(1):
        suffix = "" if attempt == 1 else f"-{attempt}"
        folder = parent / f"{name}-{now:%Y%m%d-%H%M%S}{suffix}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise _unusable(folder, error) from error
        return claim_folder(folder, recipe_text)
    raise AssertionError("count() has no end")


def claim_folder(folder: Path, recipe_text: str) -> Path:
    """Make this folder the run's own.

    Creating `recipe.toml` is one step of the file system, which only one run can win.

    Raises:
        RecipeError: another run has it, or it holds something else.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if found := next(folder.iterdir(), None):
            raise RecipeError(
                f"{folder} is not empty (it holds {found.name}), and a run never "
                "writes over what is there: name another with --run-dir, or remove it"
            )
        with (folder / RECIPE_NAME).open("x", encoding="utf-8") as file:
            file.write(recipe_text)
    except FileExistsError as error:
        raise RecipeError(
            f"another run has just begun in {folder}: name another with --run-dir"
        ) from error
    except OSError as error:
        raise _unusable(folder, error) from error
    return folder


def _unusable(folder: Path, error: OSError) -> RecipeError:
    return RecipeError(
        f"the run cannot write into {folder}: {error.strerror or error}; "
        "name another with --run-dir"
    )
