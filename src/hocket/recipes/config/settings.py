"""What every section of a recipe is made of: kinds of values, and strictness.

And the sections that a recipe may go without: [teacher], [freeze] and [cache].
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hocket.core.layout import WorkerLayout
from hocket.errors import PlanError
from hocket.freeze.shapes import Balance
from hocket.options import ScheduleOptions, UpdateOptions, faults_of, value_faults

Count = Annotated[int, Field(ge=1)]
NaturalNumber = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, lt=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]

_FUNCTION: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def _is_function(name: str) -> str:
    if not _FUNCTION.fullmatch(name):
        raise ValueError(f"{name!r} should name a function, as 'module:function'")
    return name


FunctionName = Annotated[str, AfterValidator(_is_function)]


def _is_logger(name: str) -> str:
    if name != "tensorboard" and not _FUNCTION.fullmatch(name):
        raise ValueError(
            f"{name!r} should be 'tensorboard', or name a function that returns a "
            "logger, as 'module:function'"
        )
    return name


LoggerName = Annotated[str, AfterValidator(_is_logger)]


def _is_plain(value: Any) -> bool | int | float | str:
    is_plain = isinstance(value, bool | int | float | str)
    if not is_plain or (isinstance(value, float) and not isfinite(value)):
        raise ValueError(
            f"{value!r:.80} should be a finite number, a truth or a string"
        )
    return value  # type: ignore[no-any-return]


Plain = Annotated[Any, AfterValidator(_is_plain)]


def layout_of(text: str) -> WorkerLayout:
    """Read a layout such as "4x2".

    Raises:
        ValueError: it is none; pydantic takes only this for a fault.
    """
    try:
        return WorkerLayout.parse(text)
    except PlanError as error:
        raise ValueError(str(error)) from None


class Settings(BaseModel):
    """A section: unknown keys are refused, and values are taken as they are written.

    Attributes:
        NEEDS: keys that have an effect only where one of others is said.
        ONE_OF: keys of which one may be said.
        NOT_ALL_0: keys of which at least one is above 0.
    """

    NEEDS: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    ONE_OF: ClassVar[tuple[str, ...]] = ()
    NOT_ALL_0: ClassVar[tuple[str, ...]] = ()

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _value_is_valid(cls, value: Any, info: ValidationInfo) -> Any:
        """Check options one by one, so that all faults come at once."""
        is_option = issubclass(cls, UpdateOptions | ScheduleOptions)
        if is_option and (faults := [*value_faults(info.field_name or "", value)]):
            raise ValueError("\n".join(faults))
        return value

    @model_validator(mode="after")
    def _options_are_valid(self) -> Self:
        if faults := [*faults_of(self), *self._rule_faults()]:
            raise ValueError("\n".join(faults))
        return self

    def _rule_faults(self) -> Iterator[str]:
        for name, others in self.NEEDS.items():
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default and not any(getattr(self, other) for other in others):
                yield f"{name} {value!r} has no effect without {' or '.join(others)}"
        said = [x for x in self.ONE_OF if getattr(self, x)]
        if len(said) > 1:
            values = (f"{name} {getattr(self, name)!r}" for name in said)
            yield f"{' and '.join(values)}: say one of them (--set KEY= takes one away)"
        if self.NOT_ALL_0 and not any(getattr(self, x) for x in self.NOT_ALL_0):
            yield f"{' and '.join(self.NOT_ALL_0)} are 0: give one of them"


class FunctionSettings(Settings):
    """A function (`hocket.recipes.user_functions`); every other key is its argument.

    Args:
        function: `module:function`, in a module that is in the recipe's folder, or in
            `examples.zoo` of hocket's repository.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Plain]

    kind: Literal["function"]
    function: FunctionName

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments that the function is called with."""
        return dict(self.__pydantic_extra__)


# The section [teacher]: the teacher's weights and updates, and the student's loss.

# What an update cannot do without, with an example; and which keys are whose.
_NEEDED: Final = {"momentum": ("momentum", 0.996), "copy": ("copy_every_steps", 100)}
_OF_UPDATES: Final = {
    "momentum": ("momentum",),
    "final_momentum": ("momentum",),
    "copy_every_steps": ("copy",),
    "buffers": ("momentum", "copy"),
    "delay": ("momentum", "copy"),
    "weights": ("frozen",),
}


class TeacherSettings(Settings):
    """Settings that teachers have whatever the loss (`hocket.Teacher`).

    A frozen teacher has `weights`, or a section `[teacher_model]`, or both; one that
    moves begins as a copy of the student.

    Args:
        weights: a run's folder, or one of its checkpoints: the teacher is the model of
            that run's recipe; or a file of weights (*.safetensors) of
            `[teacher_model]`. A run that evaluates averaged weights gives those.
        update: how the teacher changes behind each step of the student: not at all, by
            a moving average of the student's weights, or by copies of them.
        momentum: the share of its own weights that each moving average keeps.
        final_momentum: its value at the end of training, reached along a cosine;
            constant where it is not said.
        copy_every_steps: the steps from one copy to the next.
        buffers: what becomes of the buffers of a teacher that moves, such as the
            statistics of a batch norm (`hocket.Momentum`).
        delay: by how many updates a teacher that moves may be stale.
        look_ahead: by how many batches its forwards are ahead of the student; 1 for a
            frozen teacher, and `delay` for one that moves, where it is not said.
        mode: in which mode its modules run; "eval" for a frozen teacher and "train" for
            one that moves, where it is not said.
        num_microbatches: the parts of the teacher's batch; as many as the student's
            where it is not said.
    """

    weights: str | None = None
    update: Literal["frozen", "momentum", "copy"] = "frozen"
    momentum: Probability | None = None
    final_momentum: Probability | None = None
    copy_every_steps: Count | None = None
    buffers: Literal["own", "copied", "averaged"] = "own"
    delay: NaturalNumber = 0
    look_ahead: NaturalNumber | None = None
    mode: Literal["eval", "train"] | None = None
    num_microbatches: Count | None = None

    @model_validator(mode="after")
    def _update_has_its_keys(self) -> TeacherSettings:
        """Refuse keys of another update, and an update without its own."""
        faults = []
        needed, example = _NEEDED.get(self.update, ("", 0))
        if needed and getattr(self, needed) is None:
            why = f"update {self.update!r} needs it, such as {example}"
            faults.append(f"{needed} is missing: {why}")
        for name, updates in _OF_UPDATES.items():
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default and self.update not in updates:
                faults.append(
                    f"{name} {value!r} has no effect with update {self.update!r}"
                )
        if faults:
            raise ValueError("\n".join(faults))
        return self

    @property
    def moves(self) -> bool:
        """Whether the weights change."""
        return self.update != "frozen"


class DistillationSettings(TeacherSettings):
    """Targets, and a teacher's probabilities (`hocket.Distillation`).

    Args:
        temperature: by which both nets' logits are divided.
        soft_weight: the weight of the loss to the teacher's probabilities.
        hard_weight: the weight of the loss to the targets.
    """

    NOT_ALL_0: ClassVar = ("soft_weight", "hard_weight")

    kind: Literal["distillation"]
    temperature: Positive = 4.0
    soft_weight: NotNegative = 0.1
    hard_weight: NotNegative = 1.0


class DistilbertSettings(TeacherSettings):
    """DistilBERT's three losses, of masked language models (`hocket.DistilBERT`).

    Args:
        temperature: by which both nets' logits are divided.
        soft_weight: the weight of the loss to the teacher's probabilities.
        mlm_weight: the weight of the loss to the masked pieces.
        cosine_weight: the weight of the loss to the teacher's last hidden states.
    """

    NOT_ALL_0: ClassVar = ("soft_weight", "mlm_weight", "cosine_weight")

    kind: Literal["distilbert"]
    temperature: Positive = 2.0
    soft_weight: NotNegative = 5.0
    mlm_weight: NotNegative = 2.0
    cosine_weight: NotNegative = 1.0


class TwoViewSettings(TeacherSettings):
    """Two views of each image, and heads behind the model (`recipes.models.make`).

    The model's own head is left out: the features before it are evaluated by k-NN. The
    views take the place of the data's own shifts and mirrors.

    Args:
        head_width: features inside the projector and the predictor.
        output_width: features that the loss compares.
        num_projector_layers: linear layers of the projector.
        num_predictor_layers: linear layers of the predictor, which the student has
            behind its projector.
        least_area: the smallest share of an image that a view shows.
        num_neighbours: whose classes decide in the k-NN evaluation.
    """

    kind: str
    head_width: Count = 4096
    output_width: Count = 256
    num_projector_layers: Count = 2
    num_predictor_layers: Count = 2
    least_area: Share = 0.08
    num_neighbours: Count = 20


class ByolSettings(TwoViewSettings):
    """Predicts the teacher's projection of the other view (`hocket.Byol`)."""

    kind: Literal["byol"]


class MocoV3Settings(TwoViewSettings):
    """Contrasts with the teacher's keys of the other view (`hocket.MocoV3`).

    Args:
        temperature: by which cosines are divided.
    """

    kind: Literal["mocov3"]
    temperature: Positive = 0.2


AnyTeacher = DistillationSettings | DistilbertSettings | ByolSettings | MocoV3Settings


# The sections [freeze] and [cache]: which layers stop training, and when.
#
# [freeze]
# policy = "alpha"                 # "none" is the baseline
# alpha = 0.2
# shapes = {5 = "2x4", 8 = "1x8"}  # stages x replicas from so many frozen layers on
def _by_number(table: Any) -> Any:
    """Return a table of TOML, whose keys are strings, by whole numbers."""
    keys = [*table] if isinstance(table, dict) else []
    wrong = [x for x in map(str, keys) if not (x.isascii() and x.isdecimal())]
    if wrong:
        raise ValueError(f"{wrong[0]!r:.80} should be a whole number, such as 4")
    return {int(key): table[key] for key in keys} if keys else table


Layout = Annotated[str, AfterValidator(lambda text: str(layout_of(text)))]
Shapes = Annotated[dict[int, Layout], BeforeValidator(_by_number)]
LayersByDecision = Annotated[dict[int, NaturalNumber], BeforeValidator(_by_number)]


class FreezeSettings(Settings):
    """Settings that all policies have.

    Args:
        every_steps: steps between decisions; those of an epoch when not given.
        layers: the modules that count as layers, as "encoder.layers.*"; the children of
            the list of blocks that holds most parameters when not given.
        shapes: stages x replicas from so many frozen layers on, as {4 = "2x2"}; {}
            keeps the first layout. The predicted fastest that fits
            `pipeline.memory_bytes` when not given.
        balance: "exact" cuts stages by measured seconds; "greedy" is PipeTransformer's
            rule, by parameters; without `shapes` it also takes half the stages each
            time.
        recut: whether layers change their devices when others freeze; if not, each
            stays where it is, and the first layout stays.
    """

    policy: str
    every_steps: Count | None = None
    layers: str | None = None
    shapes: Shapes | None = None
    balance: Balance = "exact"
    recut: bool = True


class NoFreezing(Settings):
    """No layer freezes."""

    policy: Literal["none"]


class AlphaSettings(FreezeSettings):
    """A fixed share of the layers left, at each decision (`hocket.freeze.Alpha`).

    Args:
        alpha: the share.
    """

    policy: Literal["alpha"]
    alpha: Share = 0.2


class ArgminGradientSettings(FreezeSettings):
    """Up to the smallest gradient (`hocket.freeze.ArgminGradient`).

    Args:
        alpha: the largest share of the layers left that freezes at a decision.
        patience: as many decisions in a row must propose it; 1 is the published rule.
    """

    policy: Literal["argmin-gradient"]
    alpha: Share = 0.2
    patience: Count = 2


class PercentileSettings(FreezeSettings):
    """Before the first gradient that still changes (`hocket.freeze.Percentile`).

    Args:
        percentile: the percentile, from 0 to 100, of the changes of gradients.
        patience: as many decisions in a row must propose it; 1 is the published rule.
    """

    policy: Literal["percentile"]
    percentile: Annotated[float, Field(ge=0, le=100)] = 50.0
    patience: Count = 2


class PlasticitySettings(FreezeSettings):
    """When activations move no more (`hocket.freeze.Plasticity`).

    Args:
        window: the plasticities to which a line is fitted.
        tolerance: it is flat if its slope is at most this share of the steepest.
        patience: decisions in a row at which it must be flat.
        unfreeze_at: the share of the learning rate at which all layers train again; 0
            for never.
    """

    policy: Literal["plasticity"]
    window: Annotated[int, Field(ge=2)] = 4
    tolerance: Positive = 0.2
    patience: Count = 2
    unfreeze_at: Annotated[float, Field(ge=0, lt=1)] = 0.1


class ListedSettings(FreezeSettings):
    """A schedule by hand (`hocket.freeze.Listed`).

    Args:
        num_frozen: layers that are frozen from a decision on, as {2 = 6, 4 = 8}: six
            after two epochs, or after 2 x `every_steps` steps.
    """

    policy: Literal["listed"]
    num_frozen: LayersByDecision


AnyFreezing = (
    NoFreezing
    | AlphaSettings
    | ArgminGradientSettings
    | PercentileSettings
    | PlasticitySettings
    | ListedSettings
)


class CacheSettings(Settings):
    """The outputs of frozen layers are kept (`hocket.Cache`).

    Args:
        folder: where the files are, relative to the current folder; a folder holds the
            outputs of one model. In the run's own folder when not given.
        ram_bytes: the most memory of each worker for them.
        disk_bytes: the most that each worker writes to the folder.
        dtype: "bfloat16" keeps half as many bytes, rounded; as computed when not given.
        draws_once: random changes of training samples are drawn once, and are the same
            in each epoch; without it, data that change them are refused.
    """

    NOT_ALL_0: ClassVar = ("ram_bytes", "disk_bytes")

    folder: str | None = None
    ram_bytes: NaturalNumber = 0
    disk_bytes: NaturalNumber = 0
    dtype: Literal["bfloat16"] | None = None
    draws_once: bool = False
