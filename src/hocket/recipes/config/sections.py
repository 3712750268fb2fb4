"""What a recipe may say: every section and key, with its default and its limits.

A recipe is one TOML file. Its sections are classes, its keys their fields:

    [model]       kind, and what that kind of model takes
    [data]        kind, and what that kind of data takes
    [optimizer]   kind, and what that kind of optimizer takes
    [task]        the user's own loss and metrics
    [teacher]     kind of loss that reads a teacher, and the teacher's weights and
                  updates; none where it is not said          (settings.py)
    [teacher_model]  kind, as of [model]; for a teacher that is no run's model
    [training]    how long, in which batches, from which seed
    [pipeline]    how many workers, and their order of work
    [freeze]      policy by which layers stop training, and what it takes
    [cache]       where outputs of frozen layers are kept             (settings.py)
    [checkpoint]  how often to save, and where to go on from
    [run]         where its folder goes, and how often it writes into it

Here is what they mean; `hocket.recipes.config.resolve` reads them from files and
`--set`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from hocket.core.formats.given import is_path
from hocket.nearest import nearest
from hocket.options import CAPTURED_STEP, ScheduleOptions, UpdateOptions
from hocket.recipes.config.settings import (
    AnyFreezing,
    AnyTeacher,
    CacheSettings,
    Count,
    Decay,
    FunctionName,
    FunctionSettings,
    LoggerName,
    NaturalNumber,
    NotNegative,
    Positive,
    Probability,
    Settings,
    Share,
    layout_of,
)
from hocket.schedules import SCHEDULES


# The section [pipeline]: how many workers, and their order of work.
class PipelineSettings(Settings, ScheduleOptions):
    """How many workers, and their order of work; beside them, a pipeline's options.

    Args:
        num_workers: processes, one per device; a multiple of `num_replicas` x
            `num_shards`.
        layout: all numbers in one word, as published experiments have it: "4x2" is 4
            devices per pipeline x 2 replicas, 8 workers in all; "4x2x2" has 2 shards
            for each device of a replica, 16 workers in all.
        schedule: a name from `hocket.SCHEDULES`; or "auto": the planner's choice; or
            "ooo-single": one worker, which captures its whole step; or the path of a
            file with an order of one step (PyTorch's CSV, *.csv, or text, *.txt),
            relative to the current folder.
        timeout_s: how long a worker waits for another before both give up.
    """

    num_workers: Count = 2
    layout: str | None = None
    schedule: str = "1f1b"
    timeout_s: float = 60.0

    @model_validator(mode="before")
    @classmethod
    def _layout_says_all(cls, given: Any) -> Any:
        """Workers, replicas and shards follow from a layout where they are not said."""
        if not isinstance(given, dict) or not isinstance(given.get("layout"), str):
            return given
        layout = layout_of(given["layout"])
        numbers = {
            "num_workers": layout.num_workers,
            "num_replicas": layout.num_replicas,
            "num_shards": layout.num_shards,
        }
        said = {**numbers, **given}
        if any(said[name] != number for name, number in numbers.items()):
            has_shards = layout.num_shards > 1 or said["num_shards"] != 1
            shards = f" of {layout.num_shards} shards" if has_shards else ""
            own = f", num_shards {said['num_shards']}" if has_shards else ""
            raise ValueError(
                f"layout {layout} is {layout.num_workers} workers in "
                f"{layout.num_replicas} replicas{shards}, but num_workers is "
                f"{said['num_workers']} and num_replicas {said['num_replicas']}{own}: "
                "say one or the other (--layout replaces these numbers; "
                "--set pipeline.layout= takes the layout away)"
            )
        return said

    @field_validator("schedule")
    @classmethod
    def _is_registered(cls, name: str) -> str:
        known = (name for name in SCHEDULES if name != "forward-only")
        names = [*known, "auto", CAPTURED_STEP]
        if name not in names and not is_path(name):
            raise ValueError(f"no schedule {name!r}; {nearest(name, names)}")
        return name

    @model_validator(mode="after")
    def _replicas_share_the_workers(self) -> PipelineSettings:
        if self.num_workers % self.num_pipelines:
            shards = f" x num_shards {self.num_shards}" if self.num_shards > 1 else ""
            raise ValueError(
                f"num_workers {self.num_workers} is not a multiple of "
                f"num_replicas {self.num_replicas}{shards}"
            )
        return self

    @property
    def num_devices(self) -> int:
        """The devices of one pipeline."""
        return self.num_workers // self.num_pipelines


# The section [optimizer]: what each kind of optimizer takes.
class OptimizerSettings(Settings):
    """Settings that all optimizers have.

    Args:
        learning_rate: its highest value.
        num_warmup_steps: steps of a linear rise to it.
        fall: the decay after that, to the end of training: along a cosine or a line.
        final_fraction: the share of it that is left at the end; 1 keeps it constant.
        weight_decay: as the optimizer defines it.
        weight_decay_on: all parameters, or only those of two and more dimensions: not
            biases and norms.
    """

    NEEDS: ClassVar = {"weight_decay_on": ("weight_decay",)}

    learning_rate: Positive = 1e-3
    num_warmup_steps: NaturalNumber = 0
    fall: Literal["cosine", "linear"] = "cosine"
    final_fraction: Probability = 0.0
    weight_decay: NotNegative = 0.0
    weight_decay_on: Literal["all", "matrices"] = "all"


class AdamwSettings(OptimizerSettings):
    """torch.optim.AdamW.

    Args:
        beta1: the decay of the running mean of gradients.
        beta2: the decay of the running mean of their squares.
        epsilon: added to the root of the latter.
    """

    kind: Literal["adamw"]
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: Positive = 1e-8


class SgdSettings(OptimizerSettings):
    """torch.optim.SGD.

    Args:
        momentum: how much of the last update each step keeps.
        nesterov: whether each step looks ahead by the momentum.
    """

    NEEDS: ClassVar = OptimizerSettings.NEEDS | {"nesterov": ("momentum",)}

    kind: Literal["sgd"]
    momentum: Decay = 0.0
    nesterov: bool = False


class LarsSettings(OptimizerSettings):
    """Momentum SGD with a rate for each matrix (`hocket.teacher.lars`).

    Args:
        momentum: how much of the last update each step keeps.
        trust: how far a step may go, as a share of the matrix's size.
    """

    kind: Literal["lars"]
    momentum: Decay = 0.9
    trust: Positive = 0.001


class AdafactorSettings(OptimizerSettings):
    """torch.optim.Adafactor, which keeps a row and a column for each matrix.

    Args:
        beta2_decay: the power of the step's number by which old squares are forgotten.
        update_clip: the largest root mean square of an update.
    """

    kind: Literal["adafactor"]
    beta2_decay: Annotated[float, Field(lt=0)] = -0.8
    update_clip: Annotated[float, Field(ge=1)] = 1.0


AnyOptimizer = AdamwSettings | SgdSettings | LarsSettings | AdafactorSettings


# The section [model]: what each kind of model takes.
class VitSettings(Settings):
    """A small vision transformer (`hocket.recipes.models.make`).

    Args:
        width: features per token; a multiple of `num_heads`.
        num_blocks: pairs of attention and MLP.
        num_heads: heads of each attention.
        mlp_width: features inside each MLP.
        dropout: the probability, where each half of a block joins the residual stream.
        patch_size: pixels per side of a patch; divides the image's side.
        pooling: what the head reads: a class token, or the mean over all tokens.
    """

    kind: Literal["vit"]
    width: Count = 64
    num_blocks: Count = 6
    num_heads: Count = 4
    mlp_width: Count = 128
    dropout: Decay = 0.0
    patch_size: Count = 2
    pooling: Literal["token", "mean"] = "token"

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> VitSettings:
        if self.width % self.num_heads:
            raise ValueError(
                f"width {self.width} is not a multiple of num_heads {self.num_heads}"
            )
        return self


class ModelFunctionSettings(FunctionSettings):
    """A function that returns the user's own model, an `nn.Module`."""


ModelSettings = VitSettings | ModelFunctionSettings


# The section [data]: what each kind of data takes.
class DigitsSettings(Settings):
    """scikit-learn's 1797 handwritten digits (`hocket.recipes.data`).

    Args:
        test_fraction: the share of each class that is kept for evaluation.
        shift_probability: the probability that a training image is shifted by up to one
            pixel in each direction, drawn for each image and epoch.
    """

    kind: Literal["digits"]
    test_fraction: Share = 0.25
    shift_probability: Probability = 0.5


class DataFunctionSettings(FunctionSettings):
    """A function that returns data to train on and data to evaluate on.

    Args:
        max_samples: takes only so many samples, the first ones, to train on, and to
            evaluate on; for a try.
    """

    max_samples: Count | None = None


DataSettings = DigitsSettings | DataFunctionSettings


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
        batch_size: samples per batch, over all microbatches, replicas and shards. What
            is left of an epoch after its last full batch is not trained on in that
            epoch.
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


class Sections(Settings):
    """The sections of a recipe, each valid by itself."""

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
