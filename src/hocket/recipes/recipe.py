"""What a recipe may say: every section and key, with its default and its limits.

A recipe is one TOML file. Its sections are the classes below, its keys their fields:

    [model]      kind, and what that kind of model takes
    [data]       kind, and what that kind of data takes
    [optimizer]  kind, and what that kind of optimizer takes
    [training]   how long, in which batches, from which seed
    [pipeline]   how many workers, and their order of work
    [run]        where its folder goes, and how often it writes into it

Here is what they mean; `hocket.recipes.resolve` reads them from files and `--set`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from hocket.errors import PlanError
from hocket.recipes.nearest import nearest
from hocket.schedules import SCHEDULES, make_schedule

DIGITS_SIDE: Final = 8  # pixels; scikit-learn's digits have no other size

Count = Annotated[int, Field(ge=1)]
NaturalNumber = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, lt=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]


class Settings(BaseModel):
    """A section: unknown keys are refused, and values are taken as they are written."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False
    )


class TransformerSettings(Settings):
    """What every transformer takes.

    Args:
        width: features per token; a multiple of `num_heads`.
        num_blocks: pairs of attention and MLP.
        num_heads: of each attention.
        mlp_width: features inside each MLP.
        dropout: the probability, where each half of a block joins the residual stream.
    """

    width: Count = 64
    num_blocks: Count = 6
    num_heads: Count = 4
    mlp_width: Count = 128
    dropout: Decay = 0.0

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> TransformerSettings:
        if self.width % self.num_heads:
            raise ValueError(
                f"width {self.width} is not a multiple of num_heads {self.num_heads}"
            )
        return self


class VitSettings(TransformerSettings):
    """A small vision transformer (`hocket.recipes.vit`).

    Args:
        patch_size: pixels per side of a patch; divides the image's side.
        pooling: what the head reads: a class token, or the mean over all tokens.
    """

    kind: Literal["vit"]
    patch_size: Count = 2
    pooling: Literal["token", "mean"] = "token"


class GptSettings(TransformerSettings):
    """A byte-level GPT (`hocket.recipes.gpt`).

    Args:
        tie_weights: whether the head reads the token embedding's weights.
        sample_bytes: how much text to generate when training has ended.
    """

    kind: Literal["gpt"]
    tie_weights: bool = False
    sample_bytes: NaturalNumber = 200


class DigitsSettings(Settings):
    """scikit-learn's 1797 handwritten digits (`hocket.recipes.digits`).

    Args:
        test_fraction: the share of each class that is kept for evaluation.
        shift_probability: of moving a training image by up to one pixel up or down and
            left or right, drawn anew for each image and epoch.
    """

    kind: Literal["digits"]
    test_fraction: Share = 0.25
    shift_probability: Probability = 0.5


class TextSettings(Settings):
    """Any text file, read as bytes (`hocket.recipes.text`).

    Args:
        path: the file. Relative to the recipe's folder where a recipe says it, to the
            current folder where `--set` does.
        window_bytes: how many bytes the model sees at once.
        validation_fraction: the last part of the file, kept for evaluation.
    """

    kind: Literal["text"]
    path: str
    window_bytes: Count = 128
    validation_fraction: Share = 0.1


class OptimizerSettings(Settings):
    """What every optimizer takes.

    Args:
        learning_rate: its highest value.
        num_warmup_steps: of a linear rise to it.
        final_fraction: of it that is left at the end, after a fall along a cosine;
            1 keeps it constant.
        weight_decay: as the optimizer defines it.
    """

    learning_rate: Positive = 1e-3
    num_warmup_steps: NaturalNumber = 0
    final_fraction: Probability = 0.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0


class AdamwSettings(OptimizerSettings):
    """torch.optim.AdamW.

    Args:
        beta1: how much of the running mean of gradients each step keeps.
        beta2: likewise, of their squares.
    """

    kind: Literal["adamw"]
    beta1: Decay = 0.9
    beta2: Decay = 0.999


class SgdSettings(OptimizerSettings):
    """torch.optim.SGD.

    Args:
        momentum: how much of the last update each step keeps.
    """

    kind: Literal["sgd"]
    momentum: Decay = 0.0


class TrainingSettings(Settings):
    """How long to train, in which batches.

    Args:
        num_epochs: passes over the training data.
        max_steps: an earlier end, where it comes first.
        batch_size: samples per step, over all microbatches and replicas. What is left
            of an epoch after its last full batch is not trained on in that epoch.
        evaluate_every_epochs: also in parts: 0.25 is four times per epoch. Training
            always ends with an evaluation.
        seed: of the weights, the order of the data, shifts and dropout.
    """

    num_epochs: Count = 10
    max_steps: Count | None = None
    batch_size: Count = 64
    evaluate_every_epochs: Positive = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0


class PipelineSettings(Settings):
    """How many workers, and their order of work.

    Args:
        num_workers: processes, one per device; a multiple of `num_replicas`.
        num_replicas: copies of the pipeline, each on its own part of the batch.
        schedule: a name from `hocket.SCHEDULES`.
        num_microbatches: that each replica cuts its part of the batch into.
        stages_per_device: for schedules that give a device several stages; their own
            choice where it is not said.
        cut: names of the modules that a stage begins with, all but the first stage's;
            balanced by a profile where it is not said.
        timeout_s: how long a worker waits for another before both give up.
    """

    num_workers: Count = 2
    num_replicas: Count = 1
    schedule: str = "1f1b"
    num_microbatches: Count = 8
    stages_per_device: Count | None = None
    cut: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    timeout_s: Positive = 60.0

    @field_validator("schedule")
    @classmethod
    def _is_registered(cls, name: str) -> str:
        names = [known for known in SCHEDULES if known != "forward-only"]
        if name not in names:
            raise ValueError(f"no schedule {name!r}; {nearest(name, names)}")
        return name

    @model_validator(mode="after")
    def _replicas_share_the_workers(self) -> PipelineSettings:
        if self.num_workers % self.num_replicas:
            raise ValueError(
                f"num_workers {self.num_workers} is not a multiple of "
                f"num_replicas {self.num_replicas}"
            )
        return self


class RunSettings(Settings):
    """What a run leaves behind.

    Args:
        name: of the run; the recipe's where it is not said.
        folder: where the folders of runs go, relative to the current one.
        log_every_steps: how often a step's numbers are written down.
        profile_folder: where profiles of models are kept, and found again.
    """

    name: str
    folder: str = "runs"
    log_every_steps: Count = 1
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

    model: Annotated[VitSettings | GptSettings, Field(discriminator="kind")]
    data: Annotated[DigitsSettings | TextSettings, Field(discriminator="kind")]
    optimizer: Annotated[AdamwSettings | SgdSettings, Field(discriminator="kind")]
    training: TrainingSettings
    pipeline: PipelineSettings
    run: RunSettings

    @model_validator(mode="after")
    def _sections_agree(self) -> Recipe:
        if faults := tuple(_contradictions(self)):
            raise ValueError("\n".join(faults))
        return self


def _contradictions(recipe: Recipe) -> Iterator[str]:
    """What no single section can see, a sentence each."""
    match recipe.model, recipe.data:
        case VitSettings(patch_size=patch), DigitsSettings():
            if DIGITS_SIDE % patch:
                yield (
                    f"model.patch_size {patch} does not divide the digits' side of "
                    f"{DIGITS_SIDE} pixels"
                )
        case GptSettings(), TextSettings():
            pass
        case model, data:
            yield f"a model of kind {model.kind!r} does not read {data.kind!r}"
    pipeline = recipe.pipeline
    num_parts = pipeline.num_replicas * pipeline.num_microbatches
    if recipe.training.batch_size < num_parts:
        yield (
            f"training.batch_size {recipe.training.batch_size} is less than one sample "
            f"for each of pipeline.num_replicas {pipeline.num_replicas} x "
            f"pipeline.num_microbatches {pipeline.num_microbatches}"
        )
    yield from _misfits(pipeline)


def _misfits(pipeline: PipelineSettings) -> Iterator[str]:
    """What the schedule, and a cut into its stages, say to the numbers."""
    try:
        schedule = make_schedule(
            pipeline.schedule,
            num_devices=pipeline.num_workers // pipeline.num_replicas,
            num_microbatches=pipeline.num_microbatches,
            num_replicas=pipeline.num_replicas,
            stages_per_device=pipeline.stages_per_device,
        )
    except PlanError as error:
        yield f"pipeline.schedule: {error}"
        return
    num_stages = schedule.program.num_stages
    if pipeline.cut is not None and len(pipeline.cut) != num_stages - 1:
        yield (
            f"pipeline.cut names {len(pipeline.cut)} modules; the schedule has "
            f"{num_stages} stages, of which all but the first begin with one"
        )
