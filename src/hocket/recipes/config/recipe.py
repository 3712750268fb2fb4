"""What a recipe may say: every section and key, with its default and its limits.

A recipe is one TOML file. Its sections are classes, its keys their fields:

    [model]       kind, and what that kind of model takes      (model_settings.py)
    [data]        kind, and what that kind of data takes       (data_settings.py)
    [optimizer]   kind, and what that kind of optimizer takes  (optimizer_settings.py)
    [task]        the user's own loss and metrics
    [teacher]     kind of loss that reads a teacher, and the teacher's weights and
                  updates; none where it is not said     (teacher_settings.py)
    [teacher_model]  kind, as of [model]; for a teacher that is no run's model
    [training]    how long, in which batches, from which seed
    [pipeline]    how many workers, and their order of work    (pipeline_settings.py)
    [freeze]      policy by which layers stop training, and what it takes
    [cache]       where outputs of frozen layers are kept       (freeze_settings.py)
    [checkpoint]  how often to save, and where to go on from
    [run]         where its folder goes, and how often it writes into it

Here is what they mean; `hocket.recipes.config.resolve` reads them from files and
`--set`.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from hocket.options import UpdateOptions
from hocket.recipes.config.cross_section_checks import cross_section_faults
from hocket.recipes.config.data_settings import DataSettings
from hocket.recipes.config.freeze_settings import AnyFreezing, CacheSettings
from hocket.recipes.config.model_settings import ModelSettings
from hocket.recipes.config.optimizer_settings import AnyOptimizer
from hocket.recipes.config.pipeline_settings import PipelineSettings
from hocket.recipes.config.settings import (
    Count,
    FunctionName,
    LoggerName,
    NaturalNumber,
    Positive,
    Settings,
)
from hocket.recipes.config.teacher_settings import AnyTeacher


class TaskSettings(Settings):
    """The user's own loss and metrics, in place of the data's.

    Args:
        loss: the user's `module:function`, called with the model's output and the
            targets of a microbatch; returns the mean over its samples, as a scalar or a
            dict of named scalars. The data's own loss when not given.
        metrics: a `module:function` with the same arguments; returns a dict of named
            means.
        evaluate: in place of metrics, a `module:function` that is called with the
            outputs for all samples, on the CPU, and with the data set; returns a dict
            of named numbers.
    """

    ONE_OF: ClassVar = ("metrics", "evaluate")

    loss: FunctionName | None = None
    metrics: FunctionName | None = None
    evaluate: FunctionName | None = None


class TrainingSettings(Settings, UpdateOptions):
    """How long to train, in which batches.

    Args:
        num_epochs: passes over the training data.
        max_steps: an earlier end, where it comes first.
        batch_size: samples per batch, over all microbatches and replicas. What is left
            of an epoch after its last full batch is not trained on in that epoch.
        num_loaders: processes per worker that read batches ahead; 0 reads when asked.
        evaluate_every_epochs: also in parts: 0.25 is four times per epoch. Once per
            epoch where neither this nor the next is said. Training always ends with an
            evaluation.
        evaluate_every_steps: the same, in steps.
        stop_patience: evaluations without a better value after which training ends
            early.
        stop_metric: which value: `loss`, or a metric's name.
        stop_goal: which of two values is the better one.
        seed: the seed of the weights, the order of the data, shifts and dropout.
    """

    NEEDS: ClassVar = {
        "stop_metric": ("stop_patience",),
        "stop_goal": ("stop_patience",),
    }
    ONE_OF: ClassVar = ("evaluate_every_epochs", "evaluate_every_steps")

    num_epochs: Count = 10
    max_steps: Count | None = None
    batch_size: Count = 64
    num_loaders: NaturalNumber = 0
    evaluate_every_epochs: Positive | None = None
    evaluate_every_steps: Count | None = None
    stop_patience: Count | None = None
    stop_metric: str = "loss"
    stop_goal: Literal["lowest", "highest"] = "lowest"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0


class CheckpointSettings(Settings):
    """How often to save, and where to go on from (`hocket.recipes.training.saving`).

    Args:
        every_steps: how often a checkpoint is written; with neither this nor the next,
            only at the end.
        every_epochs: the same, also in parts of epochs.
        final: whether one is written when training ends, so that its weights are kept.
        keep: the newest so many stay.
        background: whether training goes on while a checkpoint is being written.
        resume: "auto" goes on from the newest checkpoint in the run's folder, and
            begins at step 0 where there is none; a path, of a checkpoint or of a run's
            folder, must exist.
        allow_previous: where the checkpoint is damaged, takes the one saved before it.
    """

    ONE_OF: ClassVar = ("every_steps", "every_epochs")
    NEEDS: ClassVar = {
        "keep": ONE_OF,
        "background": ONE_OF,
        "allow_previous": (*ONE_OF, "resume"),
    }

    every_steps: Count | None = None
    every_epochs: Positive | None = None
    final: bool = True
    keep: Count = 3
    background: bool = True
    resume: str | None = None
    allow_previous: bool = False

    @property
    def is_off(self) -> bool:
        """Whether no checkpoint is written while training runs."""
        return self.every_steps is None and self.every_epochs is None


class RunSettings(Settings):
    """What a run leaves behind.

    Args:
        name: the run's name; the recipe's when not given.
        folder: where the folders of runs go, relative to the current one.
        log_every_steps: the steps between two that are logged.
        callbacks: the user's `module:function`s, each of which returns a watcher, which
            rank 0 calls with all steps and evaluations
            (`hocket.recipes.training.records.Watcher`).
        loggers: where numbers go beside `metrics.jsonl`: "tensorboard", into the run's
            folder, or the user's `module:function`s, each of which is called with the
            folder and returns a logger (`hocket.Logger`), as for W&B.
        profile_folder: where profiles of models are kept, and found again.
    """

    name: str
    folder: str = "runs"
    log_every_steps: Count = 1
    callbacks: Annotated[tuple[FunctionName, ...], Field(strict=False)] = ()
    loggers: Annotated[tuple[LoggerName, ...], Field(strict=False)] = ("tensorboard",)
    profile_folder: str = ".profiles"

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(
                f"{name!r} should name a folder: letters, digits, '_', '.' and '-' only"
            )
        return name


class Recipe(Settings):
    """A complete task: what to train on what, how long, and in which order of work."""

    model: Annotated[ModelSettings, Field(discriminator="kind")]
    data: Annotated[DataSettings, Field(discriminator="kind")]
    optimizer: Annotated[AnyOptimizer, Field(discriminator="kind")]
    task: TaskSettings
    teacher: Annotated[AnyTeacher | None, Field(discriminator="kind")] = None
    teacher_model: Annotated[ModelSettings | None, Field(discriminator="kind")] = None
    training: TrainingSettings
    pipeline: PipelineSettings
    freeze: Annotated[AnyFreezing | None, Field(discriminator="policy")] = None
    cache: CacheSettings | None = None
    checkpoint: CheckpointSettings
    run: RunSettings

    @model_validator(mode="after")
    def _sections_agree(self) -> Recipe:
        if faults := tuple(cross_section_faults(self)):
            raise ValueError("\n".join(faults))
        return self
