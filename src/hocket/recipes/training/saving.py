"""A run's checkpoints: where they are, what of the run is in them, where to go on.

    runs/mine/checkpoints/      hocket.run.checkpoint says what is in there

Beside the pipeline's state, each holds the run's own: the place in the data, what early
stopping has seen, and the totals so far. So a run that goes on ends with the numbers of
one that was never interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hocket.errors import CheckpointError
from hocket.recipes.config.recipe import CheckpointSettings
from hocket.run.checkpoint.format.folder import newest, step_of

CHECKPOINTS_NAME: Final = "checkpoints"
NEWEST: Final = "auto"


@dataclass(frozen=True, slots=True)
class Start:
    """The checkpoint that a run goes on from.

    Args:
        folder: of checkpoints.
        step: after how many; "latest" for the newest.
    """

    folder: Path
    step: int | str = "latest"


@dataclass
class Totals:
    """What a run has come to, over all its interruptions.

    Args:
        num_steps: trained.
        num_samples: trained on, each as often as it was.
        training_s: that the steps took.
        seconds: since the first one, without interruptions.
        num_skipped: of the steps, those that updated nothing (float16).
    """

    num_steps: int = 0
    num_samples: int = 0
    training_s: float = 0.0
    seconds: float = 0.0
    num_skipped: int = 0


def starting_point(
    run_dir: Path, settings: CheckpointSettings, *, is_restart: bool
) -> Start | None:
    """Where a run begins: at a checkpoint, or anew for None.

    A run that was started again after a failure goes on from its own newest checkpoint.

    Args:
        run_dir: the run's folder.
        settings: what the user asks for.
        is_restart: whether these workers take the place of others that failed.

    Raises:
        CheckpointError: the user named a checkpoint, and it is not there.
    """
    own = run_dir / CHECKPOINTS_NAME
    if (is_restart or settings.resume == NEWEST) and newest(own) is not None:
        return Start(own)
    if settings.resume is None or settings.resume == NEWEST:
        return None
    return _named(Path(settings.resume))


def _named(path: Path) -> Start:
    """A checkpoint, a folder of some, or the folder of a run that has some."""
    if step_of(path) >= 0 and path.is_dir():
        return Start(path.parent, step_of(path))
    folder = path / CHECKPOINTS_NAME if (path / CHECKPOINTS_NAME).is_dir() else path
    if newest(folder) is None:
        raise CheckpointError(
            f"checkpoint.resume: there is no checkpoint in {path}: name a checkpoint, "
            f"or a run's folder with some in {CHECKPOINTS_NAME}/; or leave it out, and "
            "training begins anew"
        )
    return Start(folder)
