"""Creates and locks the folder of a run; an existing run is never overwritten.

    runs/digits-vit-20260704-101500/
        recipe.toml      the recipe as resolved; the run that creates it owns the folder
        metrics.jsonl    (hocket.recipes.training.watchers)
        tensorboard/
        report.html      predicted and measured timeline
        checkpoints/     (hocket.recipes.training.saving)
        cache/           outputs of frozen layers, if the recipe names no folder
        lock             held while the run is active
        workers/         reports of failed workers (hocket.run.diagnostics)

Two runs never share a folder: the second one fails. A run that resumes from its own
checkpoint uses its folder again.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from hocket.errors import RecipeError
from hocket.recipes.config.resolve import Resolved
from hocket.recipes.config.sections import CheckpointSettings
from hocket.recipes.run_files import CHECKPOINTS_NAME, RECIPE_NAME
from hocket.run.checkpoint.format.durable import FolderLock
from hocket.run.checkpoint.format.folder import LATEST, step_of
from hocket.run.checkpoint.format.newest import find, newest

NEWEST: Final = "auto"


def enter_folder(
    resolved: Resolved, run_dir: Path | None, *, is_restart: bool = False
) -> tuple[Path, FolderLock]:
    """Create or reopen a run's folder, and lock it.

    Args:
        resolved: the recipe, which is written into the folder.
        run_dir: the folder that the user names, if any.
        is_restart: whether workers that failed began the run there.

    Returns:
        The folder, and a lock to be held until the run has ended.

    Raises:
        RecipeError: the folder cannot be used.
        CheckpointError: another run is active there.
    """
    text, run = resolved.to_toml(), resolved.recipe.run
    if run_dir is None:
        _require_run_dir(resolved.recipe.checkpoint, is_restart=is_restart)
        folder = new_folder(Path(run.folder), run.name, text, datetime.now())
        return folder, FolderLock(folder)
    if _goes_on(resolved, run_dir, is_restart=is_restart):
        lock = FolderLock(run_dir)
        (run_dir / RECIPE_NAME).write_text(text, encoding="utf-8")
        return run_dir, lock
    return claim_folder(run_dir, text), FolderLock(run_dir)


def refuse_folder(resolved: Resolved, run_dir: Path | None) -> None:
    """Refuse what `enter_folder` or `resume_point` would, and write nothing.

    Imports no torch, for this comes first.

    Args:
        resolved: the recipe.
        run_dir: the folder that the user names, if any.

    Raises:
        RecipeError: the folder cannot be used.
        CheckpointError: the checkpoint that the recipe names does not exist.
    """
    checkpoint = resolved.recipe.checkpoint
    folder = run_dir or Path(resolved.recipe.run.folder)
    if run_dir is None:
        _require_run_dir(checkpoint, is_restart=False)
    elif run_dir.is_dir() and not _goes_on(resolved, run_dir, is_restart=False):
        _refuse_content(run_dir)
    there = next(x for x in (folder, *folder.absolute().parents) if x.exists())
    try:
        TemporaryFile(dir=there).close()  # which has no name
    except OSError as error:  # also what the kernel refuses to root
        raise _unusable(folder, error) from error
    resume_point(folder, checkpoint, is_restart=False)


def _goes_on(resolved: Resolved, run_dir: Path, *, is_restart: bool) -> bool:
    """Return whether a run that began in a folder goes on there."""
    resumes = is_restart or resolved.recipe.checkpoint.resume == NEWEST
    return resumes and (run_dir / RECIPE_NAME).is_file()


def _refuse_content(folder: Path) -> None:
    """Refuse a folder that is not empty.

    Raises:
        RecipeError: it holds a file.
    """
    if found := next(folder.iterdir(), None):
        raise RecipeError(
            f"{folder} is not empty (it holds {found.name}), and a run never "
            "writes over what is there: name another with --run-dir, or remove it"
        )


def _require_run_dir(checkpoint: CheckpointSettings, *, is_restart: bool) -> None:
    """Refuse to resume without a run's folder to resume in.

    Raises:
        RecipeError: the run resumes, and no folder is given.
    """
    if checkpoint.resume == NEWEST:
        raise RecipeError(
            "checkpoint.resume 'auto' goes on in the run's folder: name it with "
            "--run-dir"
        )
    if is_restart and not checkpoint.is_off:
        raise RecipeError(
            "torchrun has started the workers again, and without --run-dir they do not "
            "know which folder's checkpoints to go on from: name it from the beginning"
        )


def new_folder(parent: Path, name: str, recipe_text: str, now: datetime) -> Path:
    """Make the folder `parent/name-date-time`, or the first free one after it.

    Args:
        parent: the folder's parent, created if missing.
        name: the run's name.
        recipe_text: the content of `recipe.toml`.
        now: the time in the folder's name.

    Raises:
        RecipeError: no folder can be made there.
    """
    named = parent / f"{name}-{now:%Y%m%d-%H%M%S}"
    folder, number = named, 1
    while True:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            folder = named.with_name(f"{named.name}-{number}")
        except OSError as error:
            raise _unusable(folder, error) from error
        else:
            return claim_folder(folder, recipe_text)


def claim_folder(folder: Path, recipe_text: str) -> Path:
    """Make this folder the run's own.

    Creating `recipe.toml` is atomic: only one run can succeed.

    Raises:
        RecipeError: another run has it, or it is not empty.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_content(folder)
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


def resume_point(
    run_dir: Path, settings: CheckpointSettings, *, is_restart: bool
) -> tuple[Path, int | str] | None:
    """Return the checkpoint that a run resumes from; None to begin at step 0.

    It is a folder of checkpoints, and the number of steps before it, or "latest".

    A run that is restarted after a failure resumes from its own newest checkpoint.

    Args:
        run_dir: the run's folder.
        settings: the recipe's.
        is_restart: whether these workers replace others that failed.

    Raises:
        CheckpointError: the checkpoint that the recipe names does not exist.
    """
    own = run_dir / CHECKPOINTS_NAME
    if (is_restart or settings.resume == NEWEST) and newest(own) is not None:
        return own, LATEST
    if settings.resume is None or settings.resume == NEWEST:
        return None
    path = Path(settings.resume)
    if step_of(path) >= 0 and path.is_dir():
        return path.parent, step_of(path)
    folder = path / CHECKPOINTS_NAME if (path / CHECKPOINTS_NAME).is_dir() else path
    find(folder, LATEST)
    return folder, LATEST
