"""The section [teacher]: the teacher's weights and updates, and the student's loss."""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from pydantic import model_validator

from hocket.recipes.config.settings import (
    Count,
    NaturalNumber,
    NotNegative,
    Positive,
    Probability,
    Settings,
    Share,
)

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
    """Two views of each image, and heads behind the model (`recipes.models.heads`).

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
